"""The text of a log file, whatever wrote it; ConfigError for what is no text."""

from pathlib import Path

from steadystep.errors import ConfigError
from steadystep.given_file import must_end

_LOOK = 1 << 16  # bytes
_PICKLED = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_KNOWN = {
    b"PK\x03\x04": "an archive (perhaps a checkpoint or an Excel sheet)",
    b"PAR1": "a Parquet file",
    b"\x93NUMPY": "a numpy array",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "compressed with gzip",
    b"SQLite": "an SQLite database",
}
_ADVICE = "export the curves as CSV or JSON lines"


def encoding_of(path: Path) -> str:
    """How to decode the file."""
    must_end(path)
    try:
        with path.open("rb") as file:
            head = file.read(_LOOK)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not head.strip():
        raise ConfigError(f"{path}: the file is empty")
    if head.startswith(_PICKLED):
        raise ConfigError(f"{path}: this is a pickle, which is never opened: it could run any program; {_ADVICE}")
    for magic, what in _KNOWN.items():
        if head.startswith(magic):
            raise ConfigError(f"{path}: this is {what}; {_ADVICE}")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if b"\x00" in head:
        raise ConfigError(f"{path}: this is not a text file; {_ADVICE}")
    return "utf-8-sig"
