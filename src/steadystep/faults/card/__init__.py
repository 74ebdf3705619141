"""Which faults a training survives, with and without a guard."""

from steadystep.faults.card.row import End, Row
from steadystep.faults.card.scorecard import Scorecard, scorecard

__all__ = ["End", "Row", "Scorecard", "scorecard"]
