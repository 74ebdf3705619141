"""State that is saved together and loaded together: plain JSON, whole or not at all."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from steadystep._deprecated import STATE_PARTS
from steadystep.errors import CheckpointError

STATE_FORMAT = 1
_FORMATS = 1000  # what lies beyond is none, and may be too long to print
DETECTOR = "detector "
"""How the names of detectors begin; a later version may have more of them."""


class Stateful(Protocol):
    """A part that is saved with its owner."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        ...


class KeptObject(Protocol):
    """Anything with a state that should go back together with the weights."""

    def state_dict(self) -> Any:
        """Its state."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Back to `state`."""
        ...


def save(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """One mapping with the state of every part."""
    return {"format": STATE_FORMAT} | {name: part.state_dict() for name, part in parts.items()}


def load(parts: Mapping[str, Stateful], state: Mapping[str, Any]) -> None:
    """Give each part its own, as it was saved in this process. A detector it does not know starts afresh."""
    check(parts, state)
    for name, part in parts.items():
        if name in state:
            part.load_state_dict(state[name])


def load_checked(parts: Mapping[str, Stateful], state: Mapping[str, Any]) -> dict[str, Any]:
    """Give each part its own of a state that comes from outside, or give none of them anything.

    Returns:
        The state as it was loaded: a copy in plain JSON values.

    Raises:
        CheckpointError: it does not fit; every part is as it was.
    """
    from steadystep.state.validate import validated  # why: its schemas take a while to build; few processes need them

    if not isinstance(state, Mapping):
        raise CheckpointError(f"the guard's state is not one of ours: it is a {type(state).__name__}")
    state = {STATE_PARTS.get(name, name): part for name, part in state.items()}
    check(parts, state)
    copy = validated(parts, state)
    before = save(parts)
    try:
        load(parts, copy)
    except Exception as error:
        load(parts, before)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the guard's state does not fit: {error}") from error
    return copy


def check(names: Iterable[str], state: Mapping[str, Any]) -> None:
    """Whether these parts find what they need, before anything is changed.

    Raises:
        CheckpointError: it is of another format, or has a hole.
    """
    saved = {STATE_PARTS.get(name, name) for name in state}
    missing = {"format", *(name for name in names if not name.startswith(DETECTOR))} - saved
    found = state.get("format")
    if missing or type(found) is not int or found != STATE_FORMAT:
        known = str(found) if type(found) is int and 0 <= found < _FORMATS else f"a {type(found).__name__} for it"
        what = f"lacks {', '.join(sorted(missing))}" if missing else f"has format {known}"
        raise CheckpointError(f"this state {what}; this version of steadystep reads format {STATE_FORMAT} whole")
