"""Shows a stream to a detector, and at the same time to one that is saved and loaded again and again."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from steadystep.detectors import Detector
from steadystep.records import Finding, Signals


def row(step: int, **fields: Any) -> Signals:
    """A healthy step, but for `fields`."""
    plain: dict[str, Any] = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1}
    return Signals(step=step, **plain | fields)


def rows(count: int | None = None, *, start: int = 0, every: int = 1, **curves: Any) -> list[Signals]:
    """Steps whose fields are given as lists, one value for each step, or as the same value for all."""
    lengths = [len(values) for values in curves.values() if isinstance(values, list)]
    size = count if count is not None else lengths[0]
    return [
        row(start + every * i, **{key: v[i] if isinstance(v, list) else v for key, v in curves.items()})
        for i in range(size)
    ]


def fed(make: Callable[[], Detector], stream: Iterable[Signals]) -> list[Finding]:
    """All findings. Two detectors of the same kind hand their state to each other on the way, and must not differ."""
    plain, found, stream = make(), [], list(stream)
    here, there = make(), make()
    every = 1 if len(stream) <= 120 else 13
    for i, signals in enumerate(stream):
        now = plain.update(signals)
        assert here.update(signals) == now or repr(now).count("nan"), f"step {signals.step}: differs once it was loaded"
        found += now
        if i % every:
            continue
        there.load_state_dict(json.loads(json.dumps(here.state_dict(), allow_nan=False)))
        assert _state(there) == _state(plain), f"step {signals.step}: the state differs"
        here, there = there, here
    return found


def said(found: Iterable[Finding]) -> list[tuple[int, str]]:
    return [(finding.step, finding.severity) for finding in found]


def _state(detector: Detector) -> str:
    return json.dumps(detector.state_dict(), sort_keys=True)
