"""`steadystep train`: a whole run from one YAML file."""

from steadystep.train.job import Job, resolve
from steadystep.train.loop import train
from steadystep.train.plan import RunPlan, Summary

__all__ = ["Job", "RunPlan", "Summary", "resolve", "train"]
