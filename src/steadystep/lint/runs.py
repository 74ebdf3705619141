"""Checks a run by its log: what really happened, not what was asked for."""

from pathlib import Path

from steadystep.lint.report import Report
from steadystep.runs.checklist import checklist
from steadystep.runs.run_log import read


def check_run(path: Path) -> Report:
    """The checklist from the log and the folder.

    Raises:
        ConfigError: there is no run log.
    """
    run = read(path)
    return Report(path=str(path), kind="run", items=checklist(run), notes=run.notes)
