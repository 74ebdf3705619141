"""Exceptions raised by steadystep.

SteadystepError
├── ConfigError (also a ValueError)                 a setting is unknown, out of range or not supported
├── MisuseError (also a RuntimeError)               a call that cannot work
├── CheckpointError (also a RuntimeError)           a state cannot be written, or a file is damaged
├── UnsupportedError (also a NotImplementedError)   a known case that is not handled
└── TrainingHalted (also a RuntimeError)            the run cannot continue; no bad update was applied
"""


class SteadystepError(Exception):
    """Base class of every exception that steadystep raises."""


class ConfigError(SteadystepError, ValueError):
    """Raised for a wrong setting; the message names the key, the value and what is allowed."""


class MisuseError(SteadystepError, RuntimeError):
    """Raised for a call that cannot work; the message names what to call instead."""


class CheckpointError(SteadystepError, RuntimeError):
    """Raised when a state cannot be saved, or when a checkpoint is damaged or foreign; the message names the place."""


class UnsupportedError(SteadystepError, NotImplementedError):
    """Raised for a known case that is not handled, before anything is changed."""


class TrainingHalted(SteadystepError, RuntimeError):  # noqa: N818 - it reports an event, not a defect
    """Raised when the recovery budget is spent. The weights are those of the last accepted update.

    Args:
        step: the step at which the run stopped.
        what: what was detected.
        did: what the guard did before it stopped.
        try_next: what to try next.
    """

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
