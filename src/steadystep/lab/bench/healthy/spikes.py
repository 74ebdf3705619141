"""One step of a healthy stream made larger: who speaks at that very step?

The loss, the gradient, or both (a scaled loss) are multiplied on paper, in a copy of what each rule knows by then; the
stream itself goes on unharmed. So small spikes are compared without training anything again.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

from steadystep.config import Config
from steadystep.detectors import Detector
from steadystep.lab.bench.faulty.guarded import LOUD
from steadystep.lab.bench.rules import RULES, Rule, Sample
from steadystep.noticing import detectors
from steadystep.records import Signals

SPIKED = ("gpt", "clusters", "regression", "rnn", "autoencoder", "epochs")
"""Tasks whose loss is above zero, so that a multiple of it means something."""
FACTORS = (1.5, 2.0, 5.0)
PARTS = ("loss", "gradient", "both")
TRIED = 8
"""Steps of each run."""


def spiked(stream: Sequence[Sample], signals: Sequence[Signals], num_steps: int) -> dict[str, dict[str, int]]:
    """How often each spoke: {"loss x2": {"tried": 8, "steadystep": 1, "notes": 5, "ZClip": 0, …}, …}."""
    # why: the rules that look into tensors would have to be measured again
    rules = {name: info.make(num_steps) for name, info in RULES.items() if info.does != "touch"}
    watch = detectors(Config())
    places = {len(stream) * (2 + i) // (TRIED + 2) for i in range(TRIED)}
    found: dict[str, dict[str, int]] = {}
    for step, (sample, seen) in enumerate(zip(stream, signals, strict=True)):
        if step in places:
            for part in PARTS:
                for factor in FACTORS:
                    loss = factor if part != "gradient" else 1.0
                    grad = factor if part != "loss" else 1.0
                    counts = found.setdefault(f"{part} x{factor:g}", {"tried": 0, "steadystep": 0, "notes": 0})
                    counts["tried"] += 1
                    _try_rules(rules, _larger(sample, loss, grad), counts)
                    _try_detectors(watch, _larger_signals(seen, loss, grad), counts)
        for rule in rules.values():
            rule.update(sample)
        for detector in watch:
            detector.update(seen)
    return found


def _try_rules(rules: dict[str, Rule], sample: Sample, counts: dict[str, int]) -> None:
    for name, rule in rules.items():
        counts[name] = counts.get(name, 0) + copy.deepcopy(rule).update(sample).alarm


def _try_detectors(watch: Sequence[Detector], seen: Signals, counts: dict[str, int]) -> None:
    found = [finding.severity for detector in watch for finding in copy.deepcopy(detector).update(seen)]
    counts["steadystep"] += any(severity in LOUD for severity in found)
    counts["notes"] += bool(found)


def _larger(sample: Sample, loss: float, grad: float) -> Sample:
    return replace(
        sample, loss=sample.loss * loss, norm=sample.norm * grad, norms=tuple(norm * grad for norm in sample.norms)
    )


def _larger_signals(seen: Signals, loss: float, grad: float) -> Signals:
    return replace(
        seen,
        loss=seen.loss * loss,
        losses=tuple(value * loss for value in seen.losses),
        grad_norm=seen.grad_norm * grad,
        norms=tuple(norm * grad for norm in seen.norms),
    )
