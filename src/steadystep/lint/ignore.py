"""`# steadystep: ignore[SS101]` on a line, `# steadystep: ignore-file[SS101]` anywhere for the whole file."""

import io
import re
import tokenize
from typing import final

_COMMENT = re.compile(r"#\s*steadystep:\s*ignore(-file)?\s*(?:\[([^\]]*)\])?", re.I)
_EVERYTHING = frozenset({"*"})


@final
class Ignored:
    """What the comments of a script ask not to be told."""

    def __init__(self, text: str) -> None:
        self._lines: dict[int, frozenset[str]] = {}
        self._file: frozenset[str] = frozenset()
        for number, comment in _comments(text):
            found = _COMMENT.search(comment)
            if found is None:
                continue
            codes = frozenset(c.strip().upper() for c in found[2].split(",")) if found[2] else _EVERYTHING
            if found[1]:
                self._file |= codes
            else:
                self._lines[number] = self._lines.get(number, frozenset()) | codes

    def covers(self, code: str, first: int, end: int) -> bool:
        """Whether a hit on these lines is not to be told."""
        asked = self._file.union(*(self._lines.get(line, frozenset()) for line in range(first, end + 1)))
        return bool(asked & {code, "*"})


def _comments(text: str) -> list[tuple[int, str]]:
    if "steadystep" not in text.lower():
        return []  # nothing to ask for: a file of numbers has more tokens than anything else
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError, ValueError):  # parsed by ast but not here: form feeds, odd ends
        return [(n, line) for n, line in enumerate(text.splitlines(), 1) if "#" in line]
    return [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]
