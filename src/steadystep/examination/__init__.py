"""Diagnosis by experiment: short trials that name a cause and try the repair, and leave no trace."""

from steadystep.examination.examination import Examination, examine
from steadystep.examination.workbench import Trial

__all__ = ["Examination", "Trial", "examine"]
