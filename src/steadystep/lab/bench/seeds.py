"""Seeds as one writes them on a command line."""

import re

from steadystep.errors import ConfigError

_MOST = 10_000


def parse_seeds(text: str) -> tuple[int, ...]:
    """Numbers and ranges with both ends, each seed once.

    >>> parse_seeds("0-2,7,1")
    (0, 1, 2, 7)
    """
    found: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"--seeds {text!r}: use numbers and ranges such as 0-2,7")
        if int(match[2] or match[1]) - int(match[1]) + len(found) >= _MOST:
            raise ConfigError(f"--seeds {text!r}: more than {_MOST:,} seeds; no study needs so many")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(found))
