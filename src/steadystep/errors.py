"""Everything steadystep raises.

SteadystepError
├── ConfigError (also a ValueError)          a setting is unknown, out of range or not built yet
├── MisuseError (also a RuntimeError)        the guard was called in a way that cannot work
├── CheckpointError (also a RuntimeError)    a state cannot be written, or a file is not what was written
├── UnsupportedError (also a NotImplementedError)   a case we know of and do not handle
└── TrainingHalted (also a RuntimeError)     the run cannot go on; nothing bad was applied
"""


class SteadystepError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(SteadystepError, ValueError):
    """A setting is wrong: the message names the key, the value and what would be right."""


class MisuseError(SteadystepError, RuntimeError):
    """A call that cannot work here: the message says what to call instead."""


class CheckpointError(SteadystepError, RuntimeError):
    """A state has no form in a file, or a checkpoint is damaged or foreign: the message names the place."""


class UnsupportedError(SteadystepError, NotImplementedError):
    """A case that is known and not handled: better said at once than discovered in the weights."""


class TrainingHalted(SteadystepError, RuntimeError):  # noqa: N818 - it reports an event, not a defect
    """The budget for recovery is spent. The weights are those of the last accepted update."""

    def __init__(self, *, step: int, what: str, did: str, try_next: str) -> None:
        self.step = step
        self.what = what
        self.did = did
        self.try_next = try_next
        super().__init__(f"training halted at step {step}: {what}\n  did: {did}\n  try: {try_next}")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # why: exceptions with keyword-only arguments do not pickle by themselves, and DataLoader
        # workers and launchers send exceptions between processes.
        return _rebuild_halted, (self.step, self.what, self.did, self.try_next)


def _rebuild_halted(step: int, what: str, did: str, try_next: str) -> TrainingHalted:
    return TrainingHalted(step=step, what=what, did=did, try_next=try_next)
