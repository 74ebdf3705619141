"""The rules as a flake8 plugin. Hits that are advice are left out; `# noqa` is flake8's own matter."""

import ast
from collections.abc import Iterator
from typing import final

from steadystep.errors import ConfigError
from steadystep.lint.check import check_script
from steadystep.version import __version__


@final
class Plugin:
    """What flake8 loads by the entry point `SS`: one instance for each file."""

    name = "steadystep"
    version = __version__

    def __init__(self, tree: ast.AST, lines: list[str], filename: str = "script.py") -> None:
        self._text = "".join(lines)
        self._path = filename

    def run(self) -> Iterator[tuple[int, int, str, type["Plugin"]]]:
        """Yield line, column and message of every fault."""
        try:
            report = check_script(self._text, self._path)
        except ConfigError:  # nested too deeply: flake8 has parsed it, so there is no syntax error to report
            return
        for hit in report.faults:
            yield hit.line, hit.column, f"{hit.code} {hit.message}", type(self)
