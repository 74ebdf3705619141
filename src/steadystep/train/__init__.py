"""`steadystep train`: a whole run from one YAML file. A file is read without torch; `train` loads it on first use."""

from typing import TYPE_CHECKING

from steadystep._utils import lazy_names
from steadystep.train.plan import RunPlan, Summary

if TYPE_CHECKING:
    from steadystep.train.job import Job, resolve
    from steadystep.train.loop import train

__all__ = ["Job", "RunPlan", "Summary", "resolve", "train"]

__getattr__ = lazy_names(__name__, {"job": ("Job", "resolve"), "loop": ("train",)})
