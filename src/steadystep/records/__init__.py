"""The records that cross the five stages, in one direction: Signals, Finding, Diagnosis, Plan, Outcome.

They hold plain numbers and names, never tensors, so a decision can be repeated on another rank, from a log, or without
torch. Each record converts to JSON and back unchanged (NaN and infinity as strings, which JSON lacks).
"""

from steadystep._deprecated import old_names
from steadystep.records.decisions import Diagnosis, Finding, Incident, Outcome, Plan
from steadystep.records.evidence import BatchPartStats, BatchStats, OutputStats, Structure, WeightStats
from steadystep.records.record import (
    GRAVE,
    LOUD,
    SEVERITIES,
    Action,
    ActionName,
    Damage,
    DetectorName,
    Quarantined,
    Record,
    Severity,
    severity_rank,
)
from steadystep.records.signals import (
    REPLICAS_EVERY,
    WEIGHTS_EVERY,
    BitFlip,
    Counterfactual,
    InputStats,
    Miscomputation,
    Probe,
    Signals,
)

__all__ = [
    "GRAVE",
    "LOUD",
    "REPLICAS_EVERY",
    "SEVERITIES",
    "WEIGHTS_EVERY",
    "Action",
    "ActionName",
    "BatchPartStats",
    "BatchStats",
    "BitFlip",
    "Counterfactual",
    "Damage",
    "DetectorName",
    "Diagnosis",
    "Finding",
    "Incident",
    "InputStats",
    "Miscomputation",
    "Outcome",
    "OutputStats",
    "Plan",
    "Probe",
    "Quarantined",
    "Record",
    "Severity",
    "Signals",
    "Structure",
    "WeightStats",
    "severity_rank",
]

__getattr__ = old_names(__name__)
