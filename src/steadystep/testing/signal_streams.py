"""Made-up runs: what a detector may meet, healthy and not."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from steadystep.records import Counterfactual, InputStats, Probe, Signals

MakeStream = Callable[[int, random.Random], dict[str, Any]]

_NAMES = ("embed.weight", "block.weight", "head.weight")
_MODULES = ("act1", "act2")


def signal_streams(*, steps: int = 300, seed: int = 0) -> dict[str, tuple[Signals, ...]]:
    """Return made-up runs by name, each as the signals that a detector sees, in order.

    The same arguments give the same numbers on every machine.

    Args:
        steps: optimizer steps per run.
        seed: seed of the random numbers.
    """
    streams = {name: _stream(make, steps, f"{seed} {name}") for name, make in _STREAMS.items()}
    streams["one step"] = streams["healthy"][:1]
    streams["a NaN burst"] = with_burst(streams["healthy"], at=steps // 2, length=7)
    streams["resumed far away"] = tuple(replace(s, step=s.step + 1_000_000) for s in streams["healthy"][:50])
    return streams


def with_burst(stream: tuple[Signals, ...], *, at: int, length: int) -> tuple[Signals, ...]:
    """The stream with `length` steps of NaN put in between; what follows is the same, that many steps later."""
    calm = replace(stream[min(at, len(stream) - 1)], probe=None, inputs=None, counterfactual=None)
    bad = replace(calm, loss=math.nan, losses=(math.nan,), grad_norm=math.nan, norms=(math.nan,) * len(calm.norms))
    burst = (replace(bad, step=at + i, refused_in_a_row=i) for i in range(length))
    return (*stream[:at], *burst, *(replace(s, step=s.step + length) for s in stream[at:]))


def _stream(make: MakeStream, steps: int, seed: str) -> tuple[Signals, ...]:
    rng = random.Random(seed)
    return tuple(_signals(step, rng, make(step, rng)) for step in range(steps))


def _signals(step: int, rng: random.Random, changes: dict[str, Any]) -> Signals:
    """A healthy step with `changes`; the norm follows the tensors' unless it is given."""
    norms = changes.pop("norms", tuple(size * math.exp(rng.gauss(0.0, 0.1)) for size in (0.3, 0.8, 0.5)))
    loss = changes.pop("loss", 2.0 + 2.0 * math.exp(-step / 100) + rng.gauss(0.0, 0.05))
    plain: dict[str, Any] = {
        "loss": loss,
        "losses": (loss,),
        "grad_norm": math.hypot(*norms),
        "norms": norms,
        "names": _NAMES[: len(norms)],
        "lr": 1e-3 * min(1.0, (step + 1) / 20),
    }
    return Signals(step=step, **plain | changes)


def _spikes(step: int, rng: random.Random) -> dict[str, Any]:
    wild = step % 70 == 69
    return {"loss": 40.0 + rng.random(), "norms": (900.0, 2000.0, 300.0)} if wild else {}


def _diverging(step: int, rng: random.Random) -> dict[str, Any]:
    rise = max(0, step - 100)
    return {"loss": 3.0 + 0.01 * rise + rng.gauss(0.0, 0.05), "lr": 1e-3 * 1.01 ** min(rise, 2000)}


def _rubbish(step: int, rng: random.Random) -> dict[str, Any]:
    pick = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324, -1.0, 1.0)
    norms = tuple(abs(rng.choice(pick)) for _ in _NAMES)
    return {
        "loss": rng.choice(pick),
        "norms": norms,
        "lr": rng.choice(pick),
        "scale": abs(rng.choice(pick)),
        "scaled": rng.random() < 0.5,
        "metrics": {"reward": rng.choice(pick)},
        "bad_buffers": ("norm.running_var",) if rng.random() < 0.1 else (),
        "input_finite": rng.choice((None, True, False)),
    }


def _now_and_then(step: int, rng: random.Random) -> dict[str, Any]:
    odd = (
        {"loss": math.nan},
        {"loss": math.inf},
        {"norms": (1.0, math.nan, 1.0)},
        {"norms": (1.0, 1.0, math.inf)},
        {"lr": math.nan},
        {"lr": math.inf},
        {"bad_buffers": ("norm.running_var",)},
    )
    return dict(odd[step // 10 % len(odd)]) if step % 10 == 9 else {}


def _overflowing(step: int, rng: random.Random) -> dict[str, Any]:
    scale = 65536.0 * 0.5 ** (step // 9)
    return {"scaled": True, "scale": scale} | ({"norms": (math.inf, 1.0, 1.0)} if step % 9 == 8 else {})


def _probed(step: int, rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"metrics": {"accuracy": rng.random()}, "repeatable": True}
    found |= {"buffers": ("norm.running_var",), "buffer_peaks": (1e5 if step % 90 == 89 else 1.0 + rng.random(),)}
    found["batch_rms"] = None if step % 7 == 0 else 1e6 if step % 90 == 80 else 1.0 if step > 250 else rng.random()
    if step % 20 == 7:
        found |= {
            "weights": _NAMES,
            "weight_norms": (1.0, math.nan if step == 167 else 2.0, 1e3 if step > 300 else 3.0),
            "state": tuple(f"exp_avg_sq of {name}" for name in _NAMES),
            "state_peaks": (1e-3 if step > 220 else 1.0, math.nan if step == 147 else 1e-6 if step > 220 else 2.0, 0.0),
        }
    if step % 25 == 24:
        found["probe"] = _probe(step - 1, rng, wild=step > 200)
    if step == 8:
        found["inputs"] = InputStats(
            batches=8, mean=0.1, std=1.1, largest=5.0, constant_share=0.0, scale_spread=3.0, finite=True
        )
    if step % 50 == 49:
        found["counterfactual"] = Counterfactual(
            step=step - 20, old_loss=2.0 + rng.random(), current_loss=2.0 + rng.random()
        )
    return found


def _probe(step: int, rng: random.Random, *, wild: bool) -> Probe:
    size = 1e4 if wild else 1.0

    def each(typical: float) -> tuple[float, ...]:
        return tuple(typical * size * math.exp(rng.gauss(0.0, 0.1)) for _ in _NAMES)

    return Probe(
        step=step,
        names=_NAMES,
        weight_rms=(0.02, 0.02, 0.0),  # a layer that starts at zero
        update_rms=each(2e-5),
        second_moments=each(1e-6),
        surprises=each(1.0),
        zero_shares=(1.0, 0.5, 0.0) if wild else (0.1, 0.0, 0.0),
        modules=_MODULES,
        dead=(0.9, 0.0) if wild else (0.1, 0.0),
        saturated=(0.0, 0.9) if wild else (0.0, 0.1),
        tables=("embed.weight",),
        row_norms=(size * (1.0 + step / 100.0),),
        attentions=("attention",),
        logit_bounds=(size * (2.0 + step / 100.0),),
    )


def _poor_probe(step: int, rng: random.Random) -> dict[str, Any]:
    if step % 2:
        return {"probe": Probe(step=step - 1)}
    bad = (math.nan, math.inf, 0.0)
    return {"probe": Probe(step=step - 1, names=_NAMES, weight_rms=bad, update_rms=bad, zero_shares=bad)}


_STREAMS: dict[str, MakeStream] = {
    "healthy": lambda step, rng: {},
    "spikes": _spikes,
    "diverging": _diverging,
    "rubbish": _rubbish,
    "not finite now and then": _now_and_then,
    "overflowing": _overflowing,
    "with probes": _probed,
    "with poor probes": _poor_probe,
    "no gradients": lambda step, rng: {"norms": ()},
    "zero": lambda step, rng: {"loss": 0.0, "norms": (0.0, 0.0, 0.0), "lr": 0.0},
    "constant": lambda step, rng: {"loss": 1.0, "norms": (1.0, 2.0, 2.0), "lr": 0.1},
    "zero mean": lambda step, rng: {"loss": rng.gauss(0.0, 0.1)},
    "negative": lambda step, rng: {"loss": -1e5 + rng.gauss(0.0, 100.0), "norms": (1e4, 1e4 * rng.random(), 0.0)},
    "huge": lambda step, rng: {"loss": 1e307 * (1 + rng.random()), "norms": (1e307 * rng.random(), 1e300, 1.0)},
    "tiny": lambda step, rng: {"loss": 5e-324, "norms": (5e-324, 0.0, 1e-300 * rng.random()), "lr": 5e-324},
    "alternating": lambda step, rng: {"loss": 2.0 + (-1) ** step * 1.02 ** min(step, 400) + rng.gauss(0.0, 0.01)},
    "adding up": lambda step, rng: {"norms": (step + 1.0, 2.0 * step + 2.0, 0.0)},
    "micro-batches": lambda step, rng: {"losses": (2.0, 3.0, math.nan if step % 40 == 39 else 4.0)},
    "tensors come and go": lambda step, rng: {"norms": (1.0, 1.0, 1.0)[: 1 + step % 3]},
}
