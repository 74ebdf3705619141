"""Contract checks for detectors and sinks of your own: no torch, plain numbers.

What every detector owes to those who call it, as one function that proves it; the same for sinks.
"""

import copy
import json
import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from steadystep.detectors.detector import Detector
from steadystep.records import SEVERITIES, Finding, Incident, Severity, Signals
from steadystep.testing.signal_streams import signal_streams, with_burst
from steadystep.tracking import GradientSample, RunStart, Sink, StepRow

__all__ = ["check_detector", "check_sink", "signal_streams"]


MakeDetector = Callable[[], Detector]
Stream = tuple[Signals, ...]

_SEVERITIES = frozenset(get_args(Severity))


def check_detector(make: MakeDetector, *, steps: int = 300, seed: int = 0, nan_leaves_no_trace: bool = True) -> None:
    """Run a detector over `signal_streams`; raise AssertionError, with stream and step, where it breaks the contract.

    The contract: a constant name; a tuple of well-formed findings about this step; no exception, whatever the numbers;
    the same findings from the same signals; a state that is strict JSON and a copy; saved anywhere and loaded into
    another detector, fresh or used, it continues as if never interrupted; the signals are not changed; NaN is not
    learned.

    Args:
        make: returns a fresh detector, such as its class.
        steps: length of each stream.
        seed: seed of the streams.
        nan_leaves_no_trace: findings after a burst of NaN equal those without it, that many steps later. False for a
            detector that counts steps rather than finite values.

    Raises:
        AssertionError: the contract is broken.
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


def _check_name(make: MakeDetector) -> None:
    first, second = make().name, make().name
    if not isinstance(first, str) or not first:
        raise AssertionError(f"name must be a non-empty string, got {first!r}")
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
    numbers = (finding.value, finding.limit, 0.0 if finding.baseline is None else finding.baseline)
    texts = (finding.what, *finding.where) if isinstance(finding.where, tuple) else (None,)
    problems = {
        f"detector must be {name!r}": finding.detector != name,
        f"step must be {signals.step}": finding.step != signals.step,
        f"severity must be one of {sorted(_SEVERITIES)}": finding.severity not in _SEVERITIES,
        "value, limit and usual must be numbers": any(type(n) not in (int, float) for n in numbers),
        "what must be a string and where a tuple of strings": any(type(t) is not str for t in texts),
        "since must be None or a past step": finding.since is not None
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
    make: MakeDetector, stream: Stream, where: str, expected: Sequence[Any], cut: int, end: str, used_on: Stream
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
        what = f"saved before step {cut} and loaded into {kind}, it continues differently"
        _check_equal(expected, _run(second, rest, where), where, rest, what)
        if _as_json(second.state_dict(), place) != end:
            raise AssertionError(f"{place}: {what}: {second.state_dict()!r} at the end instead of {end}")
        if _as_json(loaded, place) != text:
            raise AssertionError(f"{place}: load_state_dict must copy: its argument changed afterwards")
    what = f"calling state_dict before step {cut} changed it"
    _check_equal(expected, _run(first, rest, where), where, rest, what)
    if _as_json(saved, place) != text:
        raise AssertionError(f"{place}: state_dict must copy: its result changed afterwards")


def _as_json(state: Any, place: str) -> str:
    if not isinstance(state, dict):
        raise AssertionError(f"{place}: state_dict must return a dict, got {type(state).__name__}")
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{place}: the state is not JSON ({error}): {state!r}") from error
    if json.loads(text) != state:
        raise AssertionError(
            f"{place}: the state does not survive JSON (tuples, or keys that are not strings): {state!r}"
        )
    return text


def _check_burst(make: MakeDetector, stream: Stream, where: str) -> None:
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


MakeSink = Callable[[], Sink]
SinkCall = tuple[str, tuple[Any, ...]]


def check_sink(make: MakeSink, *, steps: int = 20) -> None:
    """Lead a sink through made-up runs; raise AssertionError, with the call, where it breaks the contract.

    The contract: whatever the numbers and names, nothing is raised; it works on another thread than the one that made
    it; its arguments are not changed; a run can be resumed in the same folder by another sink of its kind, at a step
    that an earlier one had passed; `close` works before `start`.

    Args:
        make: returns a fresh sink, such as its class.
        steps: length of each run.

    Raises:
        AssertionError: the contract is broken.
    """
    with tempfile.TemporaryDirectory() as folder:
        for first, name in ((0, "a run"), (steps // 2, "a resumed run")):
            _on_a_thread(make(), list(_calls(Path(folder), first, steps)), name)
    _on_a_thread(make(), [("close", ())], "closed before it was started")


def _on_a_thread(sink: Sink, calls: list[SinkCall], where: str) -> None:
    problems: list[str] = []

    def lead() -> None:
        for method, arguments in calls:
            before = copy.deepcopy(arguments)
            try:
                getattr(sink, method)(*arguments)
            except BaseException as error:
                problems.append(f"{where}: {method}{arguments!r} raised {error!r}")
                return
            if repr(before) != repr(arguments):
                problems.append(f"{where}: {method} changed its arguments: {arguments!r} instead of {before!r}")
                return

    thread = threading.Thread(target=lead)
    thread.start()
    thread.join()
    if problems:
        raise AssertionError(problems[0])


def _calls(folder: Path, first: int, steps: int) -> Iterator[SinkCall]:
    settings = {"mode": "autopilot", "training": {"max_grad_norm": None, "lr_scheduler": "cosine", "total_steps": 99}}
    yield "start", (RunStart(name="a <b> & c", run_dir=folder, step=first, settings=settings, parameters=6),)
    for step in range(first, first + steps):
        yield "step", (_row(step),)
        if step % 5 == 4:
            norms = {"embed.weight": 0.5, "head.weight": math.nan, "dead.weight": 0.0, "hot.weight": math.inf}
            yield "layers", (step, norms)
            yield "validation", (step + 1, {"val_loss": math.nan if step == 9 else 2.0, "accuracy": 0.25})
        if step % 7 == 6:
            yield "incident", (_incident(step),)
        if step == first + 10:
            empty, odd = np.empty(0, dtype=np.float32), np.array([math.nan, math.inf, 1.0], dtype=np.float32)
            flat, wide = np.zeros(5, dtype=np.float32), np.linspace(-1, 1, 100, dtype=np.float32)
            values = {"empty": empty, "odd": odd, "flat": flat, "wide": wide}
            yield "histograms", (GradientSample(step=step, values=values),)
    yield "layers", (first + steps, {})
    yield "close", ()


def _row(step: int) -> StepRow:
    odd: tuple[float, ...] = (math.nan, math.inf, -math.inf, 0.0, 1e308, 5e-324, -1.0)
    value = odd[step % len(odd)] if step % 3 == 2 else 1.0 / (step + 1)
    metrics = {"reward": value, "accuracy (top 1) %": 0.5, "ünï/cödé": 1.0} if step % 2 else {}
    scale = 65536.0 if step % 4 == 3 else None
    return StepRow(step=step, loss=value, grad_norm=abs(value), lr=1e-3, scale=scale, metrics=metrics)


def _incident(step: int) -> Incident:
    severity = SEVERITIES[step // 7 % 4]
    return Incident(
        step=step,
        cause="non-finite-loss",
        severity=severity,
        evidence="the loss is NaN [bold] <script>\nand a second line",
        done="update skipped",
        stepped=False,
        bundle="incidents/incident-000006-skip",
        findings=(("non-finite", severity, "the loss is NaN"),),
    )
