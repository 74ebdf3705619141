"""What every detector owes to those who call it, as one function that proves it."""

import json
from collections.abc import Callable, Sequence
from typing import Any, get_args

from steadystep.detectors.detector import Detector
from steadystep.records import Finding, Severity, Signals
from steadystep.testing.signal_streams import signal_streams, with_burst

Make = Callable[[], Detector]
Stream = tuple[Signals, ...]

_SEVERITIES = frozenset(get_args(Severity))


def check_detector(make: Make, *, steps: int = 300, seed: int = 0, nan_leaves_no_trace: bool = True) -> None:
    """Run a detector over `signal_streams` and raise AssertionError, with stream and step, for a broken promise.

    The promises: a constant name; a tuple of well-formed findings about this step; no exception, whatever the numbers;
    the same findings from the same signals; a state that is strict JSON and a copy; saved anywhere and loaded into
    another, fresh or used, it goes on as if never interrupted; the signals stay as they were; NaN is not learned.

    Args:
        make: gives a fresh detector, such as its class.
        steps: the length of each stream.
        seed: of the streams.
        nan_leaves_no_trace: findings after a burst of NaN equal those without it, that many steps later. False for
            a detector that counts steps rather than finite values.
    """
    streams = signal_streams(steps=steps, seed=seed)
    _check_name(make)
    for name, stream in streams.items():
        before = [repr(signals.metrics) for signals in stream]
        whole = make()
        expected = _run(whole, stream, name)
        _check_untouched(stream, before, name)
        _check_equal(expected, _run(make(), stream, name), name, stream, "a second one of its kind differs")
        end = _as_json(whole.state_dict(), f"stream {name!r}, end")
        for cut in _cuts(len(stream)):
            _check_resume(make, stream, name, expected[cut:], cut, end, used_on=streams["spikes"])
    if nan_leaves_no_trace:
        for name in ("healthy", "spikes", "diverging", "alternating", "adding up"):
            _check_burst(make, streams[name], name)


def _check_name(make: Make) -> None:
    first, second = make().name, make().name
    if not isinstance(first, str) or not first:
        raise AssertionError(f"name must be a string that is not empty, got {first!r}")
    if first != second:
        raise AssertionError(f"name must not change: it was {first!r}, then {second!r}")


def _run(detector: Detector, stream: Sequence[Signals], where: str) -> list[tuple[Finding, ...]]:
    """Everything found, each finding looked at."""
    name = detector.name
    run = []
    for signals in stream:
        try:
            found = detector.update(signals)
        except Exception as error:
            raise AssertionError(f"stream {where!r}, step {signals.step}: update raised {error!r}") from error
        run.append(found)
        if found == () and detector.name == name:
            continue
        problem = _problem_of_all(found, name, signals)
        if detector.name != name:
            problem = f"name changed from {name!r} to {detector.name!r}"
        if problem:
            raise AssertionError(f"stream {where!r}, step {signals.step}: {problem}: {found!r}")
    return run


def _problem_of_all(found: Any, name: str, signals: Signals) -> str:
    if not isinstance(found, tuple):
        return "update must return a tuple of findings"
    return next((problem for problem in (_problem(finding, name, signals) for finding in found) if problem), "")


def _problem(finding: Any, name: str, signals: Signals) -> str:
    """What is wrong with a finding, or nothing."""
    if not isinstance(finding, Finding):
        return "not a Finding"
    numbers = (finding.value, finding.limit, 0.0 if finding.usual is None else finding.usual)
    texts = (finding.what, *finding.where) if isinstance(finding.where, tuple) else (None,)
    problems = {
        f"detector must be {name!r}": finding.detector != name,
        f"step must be {signals.step}": finding.step != signals.step,
        f"severity must be one of {sorted(_SEVERITIES)}": finding.severity not in _SEVERITIES,
        "value, limit and usual must be numbers": any(type(n) not in (int, float) for n in numbers),
        "what must be a string and where a tuple of strings": any(type(t) is not str for t in texts),
        "since must be None or a step that has been": finding.since is not None
        and (type(finding.since) is not int or not 0 <= finding.since <= signals.step),
    }
    found = [problem for problem, applies in problems.items() if applies]
    if not found and repr(Finding.from_json(finding.to_json()).to_json()) != repr(finding.to_json()):
        found.append("does not survive JSON")
    return "; ".join(found)


def _check_untouched(stream: Stream, before: list[str], where: str) -> None:
    # why: only the metrics; all else in the record is frozen
    for signals, text in zip(stream, before, strict=True):
        if repr(signals.metrics) != text:
            raise AssertionError(f"stream {where!r}, step {signals.step}: update changed the signals it was given")


def _check_equal(expected: Sequence[Any], got: Sequence[Any], where: str, stream: Sequence[Signals], what: str) -> None:
    for one, other, signals in zip(expected, got, stream, strict=True):
        if repr(one) != repr(other):  # why: NaN is not equal to itself
            raise AssertionError(f"stream {where!r}, step {signals.step}: {what}: {other!r} instead of {one!r}")


def _cuts(length: int) -> list[int]:
    return sorted({0, 1, length // 5, length // 2, length * 9 // 10, length - 1} & set(range(length)))


def _check_resume(
    make: Make, stream: Stream, where: str, expected: Sequence[Any], cut: int, end: str, used_on: Stream
) -> None:
    place, rest = f"stream {where!r}, cut before step {cut}", stream[cut:]
    first, fresh, used = make(), make(), make()
    _run(first, stream[:cut], where)
    _run(used, used_on, "spikes")
    saved = first.state_dict()
    text = _as_json(saved, place)
    for second, kind in ((fresh, "a fresh one"), (used, "a used one")):
        loaded = json.loads(text)
        try:
            second.load_state_dict(loaded)
        except Exception as error:
            raise AssertionError(f"{place}: load_state_dict raised {error!r} in {kind}") from error
        what = f"saved before step {cut} and loaded into {kind}, it goes on differently"
        _check_equal(expected, _run(second, rest, where), where, rest, what)
        if _as_json(second.state_dict(), place) != end:
            raise AssertionError(f"{place}: {what}: {second.state_dict()!r} at the end instead of {end}")
        if _as_json(loaded, place) != text:
            raise AssertionError(f"{place}: load_state_dict must copy: what it was given changed afterwards")
    what = f"calling state_dict before step {cut} changed it"
    _check_equal(expected, _run(first, rest, where), where, rest, what)
    if _as_json(saved, place) != text:
        raise AssertionError(f"{place}: state_dict must copy: what it gave changed afterwards")


def _as_json(state: Any, place: str) -> str:
    if not isinstance(state, dict):
        raise AssertionError(f"{place}: state_dict must return a dict, got {type(state).__name__}")
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{place}: the state is not JSON ({error}): {state!r}") from error
    if json.loads(text) != state:
        raise AssertionError(
            f"{place}: the state does not survive JSON (tuples, or keys that are no strings): {state!r}"
        )
    return text


def _check_burst(make: Make, stream: Stream, where: str) -> None:
    at, length = len(stream) // 3, 7
    burst = with_burst(stream, at=at, length=length)
    expected = _run(make(), stream, where)[at:]
    got = _run(make(), burst, f"{where} with {length} steps of NaN at {at}")[at + length :]
    for signals, one, other in zip(stream[at:], expected, got, strict=True):
        if [_essence(finding) for finding in one] != [_essence(finding) for finding in other]:
            raise AssertionError(
                f"stream {where!r}, step {signals.step}: {length} steps of NaN before step {at} were learned: "
                f"{other!r} instead of {one!r}"
            )


def _essence(finding: Finding) -> tuple[str, str, str]:
    return finding.severity, repr(finding.value), repr(finding.limit)
