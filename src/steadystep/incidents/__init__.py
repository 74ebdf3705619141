"""Refused steps, kept so that they can be run again: the source of a NaN, bundles on disk, replay."""

from steadystep._deprecated import old_names
from steadystep._utils.rng import RngState
from steadystep.incidents.bundle import Bundle, read_bundle, write_bundle
from steadystep.incidents.incidents import Incidents
from steadystep.incidents.locate import examine, locate
from steadystep.incidents.nan_tracer import NaNTracer
from steadystep.incidents.origin import Examination, Origin
from steadystep.incidents.refused_step import History, RefusedStep
from steadystep.incidents.replay import Replay, replay

__all__ = [
    "Bundle",
    "Examination",
    "History",
    "Incidents",
    "NaNTracer",
    "Origin",
    "RefusedStep",
    "Replay",
    "RngState",
    "examine",
    "locate",
    "read_bundle",
    "replay",
    "write_bundle",
]

__getattr__ = old_names(__name__)
