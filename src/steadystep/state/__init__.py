"""State that is saved together and loaded together: plain JSON, whole or not at all.

Whether one from outside could have been written by this guard is checked before any part is given its own. The schemas
are in `detectors` and `parts`; what several of them have in common is here.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from steadystep._deprecated import STATE_PARTS
from steadystep.errors import CheckpointError

STATE_FORMAT = 1
_FORMATS = 1000  # what lies beyond is none, and may be too long to print
DETECTOR = "detector "
"""How the names of detectors begin; a later version may have more of them."""
_AHEAD = 10_000_000  # steps: nothing in a state points further into the future
_LARGEST = 2**53


class Stateful(Protocol):
    """A part that is saved with its owner."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        ...


class KeptObject(Protocol):
    """Anything with a state that should be rolled back together with the weights."""

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
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"not a guard state (load what guard.state_dict() returned): it is a {type(state).__name__}"
        )
    state = {STATE_PARTS.get(name, name): part for name, part in state.items()}
    check(parts, state)
    copy = _validated(parts, state)
    before = save(parts)
    try:
        load(parts, copy)
    except Exception as error:
        load(parts, before)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the guard's state does not match: {error}") from error
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
        raise CheckpointError(
            f"this state {what}; this version of steadystep reads complete states of format {STATE_FORMAT}"
        )


def _validated(parts: Mapping[str, Stateful], state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `state`, in plain JSON values, with what these parts are to be given.

    Raises:
        CheckpointError: it names the part, the place in it and what is wrong.
    """
    attempts, updates = (_count(state.get(name), name) for name in ("attempts", "updates"))
    if updates > attempts:
        raise CheckpointError(
            f"not a guard state (load what guard.state_dict() returned): {updates} updates in {attempts} attempts"
        )
    copy: dict[str, Any] = {"format": STATE_FORMAT, "attempts": attempts, "updates": updates}
    for name, part in parts.items():
        if name in state:
            copy[name] = _as_json(name, state[name])
            _check_integers(name, copy[name], attempts + _AHEAD)
            _check(name, part.state_dict(), copy[name])
    return copy


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise CheckpointError(
            f"not a guard state (load what guard.state_dict() returned): {name} is {str(value)[:80]!r}"
        )
    return value


def _as_json(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(name, str(error)) from None


def _check(name: str, own: Any, saved: Any) -> None:
    """Compare a part's state with its schema; a cooldown around a detector has one of its own."""
    # why here: the schemas take a while to build, and few processes need them
    from steadystep.state.detectors import DETECTORS
    from steadystep.state.parts import PART_SCHEMAS

    if type(own) is not type(saved):
        raise _refusal(name, f"a {type(saved).__name__}, not a {type(own).__name__}")
    if name.startswith(DETECTOR) and {"until", "inner"} == own.keys():
        if "inner" not in saved:  # from before it had a cooldown
            own = own["inner"]
        else:
            if type(saved.get("until")) is not int or saved["until"] < -1:
                raise _refusal(name, f"until is {saved.get('until')!r}")
            own, saved = own["inner"], saved["inner"]
            if not isinstance(saved, dict):
                raise _refusal(name, f"inner is a {type(saved).__name__}")
    kind = DETECTORS.get(name.removeprefix(DETECTOR)) if name.startswith(DETECTOR) else PART_SCHEMAS.get(name)
    if kind is None:
        return  # a user's own: it is asked to load the state, and may refuse
    fields = getattr(kind, "model_fields", {}) if name.startswith(DETECTOR) else {}
    if not {key for key, field in fields.items() if field.is_required()} <= own.keys():
        return  # a user's own by the name of one of ours
    if name == "precision":  # whether there is a scaler is for the part itself to say
        kind = PART_SCHEMAS[name].__args__[0 if saved else 1]
    if name == "clip rule":
        kind = next((k for k in kind.__args__ if k.model_fields.keys() == own.keys()), kind)
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        adapter.validate_json(json.dumps(saved))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise _refusal(name, f"{place or 'it'}: {first['msg']}") from None
    _check_keys(name, kind, own, saved)


def _check_keys(name: str, kind: Any, own: dict[str, Any], saved: dict[str, Any]) -> None:
    fields = getattr(kind, "model_fields", None)
    if fields is None:
        return  # by name of a tensor or a metric
    known = {field.alias or key for key, field in fields.items()}
    unknown = saved.keys() - known - own.keys()
    if unknown:
        raise _refusal(name, f"it has {', '.join(sorted(unknown))[:80]}, which this version does not know")
    for key in saved.keys() - known:
        if own[key] is not None and saved[key] is not None and type(own[key]) is not type(saved[key]):
            raise _refusal(name, f"{key} is a {type(saved[key]).__name__}")


def _check_integers(name: str, value: Any, largest: int) -> None:
    """No count and no step is far ahead of the run."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
        elif type(item) is int and abs(item) > largest:
            raise _refusal(name, f"{str(item)[:40]} is not a count of this run")


def _refusal(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"not a guard state (load what guard.state_dict() returned): {name}: {what}")


Size = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
WholeNumber = Annotated[int, Field(ge=0)]
StepNumber = Annotated[int, Field(ge=-1)]
"""-1 stands for "never"."""
Losses = Annotated[list[float], Field(max_length=4096)]
Sizes = Annotated[list[Size], Field(max_length=4096)]
Steps = Annotated[list[WholeNumber], Field(max_length=4096)]


class PartState(BaseModel):
    """Strict: text that looks like a number is none, `true` is none either, and all numbers are finite.

    Keys beyond these are compared with what the part itself saves, so that a part may come to remember more.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class LevelState(PartState):
    """Of `stats.Level`."""

    values: Losses
    rejected: Losses
    since: int
    usual: tuple[float, Size] | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.usual is None) == bool(self.values):
            raise ValueError("its level does not belong to its values")
        return self


class TailState(PartState):
    """Of `stats.Tail`."""

    seen: WholeNumber
    excess: Annotated[list[tuple[WholeNumber, Size]], Field(max_length=64)]


class SumState(PartState):
    """Of `stats.Cusum`."""

    value: Size
    since: int


class RiseState(PartState):
    """Of `PlannedRise`."""

    low: Size | None
    before: Size | None
    rates: tuple[Size, Size, Size, Size]
    rested: WholeNumber


class RunsState(PartState):
    """Of `Runs`."""

    counts: dict[str, WholeNumber]
    said: list[str]


class GrowthState(PartState):
    """Of `Growth`."""

    first: dict[str, Sizes]
    last: dict[str, Sizes]
    runs: RunsState


class NothingState(PartState):
    """Of a part that remembers nothing."""
