"""A file that somebody named: is it one that can be read to its end, and what does it say?"""

import stat
from pathlib import Path

from steadystep.errors import ConfigError

LARGEST = 32 << 20  # bytes of settings, a script or a record: far beyond any that a person wrote


def must_end(path: Path) -> None:
    """Refuse what has no end (a device, a pipe) or no possible name.

    Raises:
        ConfigError: one line that says what it is.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ConfigError(f"{_shown(path)}: there is no such file or folder") from None
    except OSError as error:
        raise ConfigError(f"{_shown(path)}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{_shown(path)}: no name of a file ({error})") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfigError(f"{_shown(path)}: a device or a pipe, not a file: save it as a file and give that")


def text_of(path: Path, *, encoding: str = "utf-8", largest: int = LARGEST) -> str:
    """All of it.

    Raises:
        ConfigError: it cannot be read, has no end, is too large, or is no text in UTF-8.
    """
    must_end(path)
    try:
        if path.stat().st_size > largest:
            raise ConfigError(f"{path}: has {path.stat().st_size >> 20} MB, at most {largest >> 20} are read")
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:80]}… ({len(text)} letters)"
