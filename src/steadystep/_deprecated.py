"""Old names of public things. Each works until 0.2 and says once what it is called now.

Nothing else in the package knows them: modules are found by `install_finder`, fields of records are added by
`old_fields`, and the tables below are read where states, records and settings from before are loaded.
"""

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

_NOT_THE_USER = frozenset(("steadystep", "importlib", "contextlib", "dataclasses", "pydantic"))

MODULES: dict[str, str] = {
    "steadystep.recovery": "steadystep.checkpoints",
    "steadystep.track": "steadystep.tracking",
    "steadystep.track.sinks": "steadystep.tracking.sinks",
    "steadystep.curves": "steadystep.runs",
    "steadystep.compare": "steadystep.runs",
    "steadystep.report": "steadystep.pages",
    "steadystep.dashboard": "steadystep.pages",
    "steadystep.probe": "steadystep.lr_finder",
    "steadystep.check": "steadystep.lint",
    "steadystep.dist": "steadystep.parallel",
    "steadystep.rng": "steadystep._utils.rng",
}
"""What a module is called now."""

ELSEWHERE: dict[str, dict[str, str]] = {
    "steadystep.recovery": {
        "Holdings": "steadystep.snapshots.tensor_state:TensorState",
        "InMemory": "steadystep.snapshots.recovery:InMemory",
        "NoRecovery": "steadystep.snapshots.recovery:NoRecovery",
        "Recovery": "steadystep.snapshots.recovery:Recovery",
        "Shelf": "steadystep.checkpoints:CheckpointStore",
        "Snapshot": "steadystep.snapshots:Snapshot",
        "Snapshots": "steadystep.snapshots:Snapshots",
    },
    "steadystep.compare": {
        "Level": "steadystep.runs.comparison:CurveLevel",
        "compare_page": "steadystep.pages:compare_page",
        "level": "steadystep.runs.comparison:curve_level",
    },
    "steadystep.probe": {"Verdict": "steadystep.lr_finder:SweepShape"},
    "steadystep.check": {
        "Item": "steadystep.lint:ChecklistItem",
        "Rule": "steadystep.lint:LintRule",
    },
}
"""Names of those modules that are not where the rest of them went, as module:name."""

NAMES: dict[str, dict[str, str]] = {
    "steadystep.diagnosis": {
        "Casebook": "RunHistory",
        "Evidence": "RollbackTrial",
        "Verdict": "RollbackTrialResult",
        "needs_witness": "needs_counterfactual",
    },
    "steadystep.incidents": {
        "Case": "RefusedStep",
        "Examination": "NaNTrace",
        "Examiner": "NaNTracer",
        "examine": "trace_step",
    },
    "steadystep.records": {"BatchPart": "BatchPartStats", "Witness": "Counterfactual"},
}
"""Names of modules that are called what they were."""

FIELDS: dict[str, dict[str, str]] = {
    "Counterfactual": {"then": "old_loss", "now": "current_loss"},
    "Signals": {"healthy": "all_finite", "witness": "counterfactual"},
    "Finding": {"usual": "baseline"},
    "Plan": {"steps": "actions"},
    "Outcome": {"caught_up": "replayed"},
}
"""Fields of records, by the record."""

STATE_PARTS: dict[str, str] = {
    "backlog": "replay buffer",
    "casebook": "run history",
    "evidence": "rollback trial",
}
"""Parts of a guard's saved state."""

SETTINGS: dict[str, str] = {"catch_up_memory_mb": "replay_memory_mb"}
"""Keys of the section `recovery`."""

ACTIONS: dict[str, str] = {"catch-up": "replay"}
"""What a plan of before asked for."""


def warn_renamed(old: str, new: str) -> None:
    """Say that `old` is called `new`, at the line that used it: the first one outside this package and importlib."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in _NOT_THE_USER:
        frame = frame.f_back
    text = f"steadystep: {old} is now {new}; the old name will be removed in 0.2"
    if frame is None:
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return
    where, module = frame.f_code.co_filename, frame.f_globals.get("__name__")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, DeprecationWarning, where, frame.f_lineno, module, registry)


def old_names(module: str) -> Callable[[str], object]:
    """Return a `__getattr__` for `module` that knows old names of what is in it."""
    names = NAMES[module]

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(import_module(module), names[name])

    return find


def old_arguments(record: type) -> None:
    """Let a record be made with the names that its fields had: for those that users make, as detectors do findings."""
    names, made = FIELDS[record.__name__], record.__init__  # type: ignore[misc]

    @wraps(made)
    def init(self: object, **fields: Any) -> None:
        for old in names.keys() & fields.keys():
            warn_renamed(f"{record.__name__}({old}=)", f"{record.__name__}({names[old]}=)")
            fields[names[old]] = fields.pop(old)
        made(self, **fields)

    record.__init__ = init  # type: ignore[misc]


def old_fields(record: type) -> None:
    """Let fields of a record be read by the names they had."""
    for old, new in FIELDS.get(record.__name__, {}).items():
        setattr(record, old, property(_reader(record.__name__, old, new)))


def _reader(record: str, old: str, new: str) -> Callable[[object], object]:
    def read(self: object) -> object:
        warn_renamed(f"{record}.{old}", f"{record}.{new}")
        return getattr(self, new)

    return read


def new_settings(section: Any) -> Any:
    """The section `recovery` with the keys of this version; what is no mapping is for others to refuse."""
    if isinstance(section, Mapping):
        for old in SETTINGS.keys() & section.keys():
            warn_renamed(f"recovery.{old}", f"recovery.{SETTINGS[old]}")
            section = {SETTINGS.get(key, key): value for key, value in section.items()}
    return section


def new_keys(text: str) -> str:
    """A record in JSON that an older version wrote, with the keys of this one."""
    keys = {old: new for fields in FIELDS.values() for old, new in fields.items()}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {keys.get(key, key): renamed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return ACTIONS.get(value, value) if isinstance(value, str) else value

    return json.dumps(renamed(json.loads(text)))


class _OldModules(MetaPathFinder, Loader):
    """Finds a module by its old name: one whose attributes are those of the new one."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Only for names in the table."""
        return ModuleSpec(name, self, is_package=True) if name in MODULES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary one."""

    def exec_module(self, module: ModuleType) -> None:
        """Give it a `__getattr__`."""
        old = module.__name__
        new, elsewhere = import_module(MODULES[old]), ELSEWHERE.get(old, {})
        warn_renamed(old, MODULES[old])

        def find(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            home, _, its = elsewhere.get(name, f"{new.__name__}:{name}").partition(":")
            return getattr(import_module(home), its)

        module.__dict__["__getattr__"] = find


def install_finder() -> None:
    """Let `import` find modules by the names they had."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())
