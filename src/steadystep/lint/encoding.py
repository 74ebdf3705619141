"""The text of a script, in the encoding that it declares."""

import contextlib
import io
import tokenize
from pathlib import Path

from steadystep._utils.text import must_end, text_of
from steadystep.errors import ConfigError

_TWO_LINES = 4096


def script_of(path: Path) -> str:
    """All of it.

    Raises:
        ConfigError: it cannot be read, has no end, is too large, or is in another encoding than it declares.
    """
    must_end(path)
    try:
        with path.open("rb") as file:
            encoding = encoding_of(file.read(_TWO_LINES))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    return text_of(path, encoding=encoding)


def encoding_of(raw: bytes) -> str:
    """What the first two lines declare (PEP 263); UTF-8 if they declare nothing, or nothing known."""
    with contextlib.suppress(SyntaxError, LookupError):
        found = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
        "".encode(found)  # why: a codec that is none of text, such as rot13, is known as well
        return found
    return "utf-8-sig"
