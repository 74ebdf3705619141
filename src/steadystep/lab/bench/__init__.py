"""The studies behind `steadystep bench`: each is made of jobs, runs on all cores, resumes, and ends in a table."""

import importlib

from steadystep._utils.text import nearest_names
from steadystep.errors import ConfigError
from steadystep.lab.bench.study import Choice, Row, Study, StudyJob

STUDIES: dict[str, str] = {
    "stability": "steadystep.lab.bench.stability:STUDY",
    "precision": "steadystep.lab.bench.precision:STUDY",
    "detection": "steadystep.lab.bench.detection:STUDY",
    "recovery": "steadystep.lab.bench.recovery:STUDY",
    "overhead": "steadystep.lab.bench.overhead:STUDY",
}
"""Where each is; imported when it is asked for, since most need torch."""


def load(name: str) -> Study:
    """A study by its name."""
    if name not in STUDIES:
        raise ConfigError(f"bench {name!r} is unknown{nearest_names(name, list(STUDIES), count=len(STUDIES))}")
    module, _, member = STUDIES[name].partition(":")
    try:
        found: Study = getattr(importlib.import_module(module), member)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(f"bench {name} is not built yet") from None
    return found


__all__ = ["STUDIES", "Choice", "Row", "Study", "StudyJob", "load"]
