"""What went wrong, kept so that it can be run again: where a NaN was born, bundles on disk, replay."""

from steadystep.incidents.bundle import Bundle, read_bundle, write_bundle
from steadystep.incidents.case import Case
from steadystep.incidents.examiner import Examiner
from steadystep.incidents.history import History
from steadystep.incidents.incidents import Incidents
from steadystep.incidents.locate import examine, locate
from steadystep.incidents.origin import Examination, Origin
from steadystep.incidents.replay import Replay, replay

__all__ = [
    "Bundle",
    "Case",
    "Examination",
    "Examiner",
    "History",
    "Incidents",
    "Origin",
    "Replay",
    "examine",
    "locate",
    "read_bundle",
    "replay",
    "write_bundle",
]
