"""RECORD: the run log, and the messages a person sees. A failing disk is reported once and training goes on."""

from steadystep.track.messages import describe
from steadystep.track.run import Incident, LayerNorms, Run, Series
from steadystep.track.run_log import NoLog, RunLog, Tracker

__all__ = ["Incident", "LayerNorms", "NoLog", "Run", "RunLog", "Series", "Tracker", "describe"]
