"""The figures of docs/failures, from short real runs; prints the numbers that the pages quote.

python tools/failure_figures.py [NAME ...]    (one thread, about a minute)
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from failure_runs import Trail, deep, policy_metrics, quiet, sharp
from steadystep.lab.bench.study import pyplot

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images" / "failures"
PLAIN, GUARDED, THIRD, FAULT = "#c2410c", "#1d4ed8", "#64748b", "#94a3b8"
Axes = Any


def twins(make: Any, **how: Any) -> tuple[Trail, Trail]:
    """The same run twice: only watched, and guarded."""
    plain, guarded = Trail.of_run(make, mode="observe", **how), Trail.of_run(make, **how)
    print(f"  without: {plain.summary()}\n  guarded: {guarded.summary()}")
    return plain, guarded


def pair(make: Any, *, log: bool = False, since: int = 0, smooth: int = 1, **how: Any) -> Callable[[Any, str], None]:
    """A figure: the loss without and with a guard; triangles where the guard did something."""

    def draw(plt: Any, name: str) -> None:
        plain, guarded = twins(make, **how)
        figure, axes = plt.subplots(figsize=(6.4, 2.6))
        curve(axes, mean_of(plain.losses, smooth), PLAIN, "without a guard", since)
        curve(axes, mean_of(guarded.losses, smooth), GUARDED, "guarded", since)
        mark(axes, guarded, mean_of(guarded.losses, smooth), since)
        first = how.get("fault", {}).get("at")
        if first is not None:
            axes.axvline(first, color=FAULT, linestyle=":", label="fault")
        if log:
            axes.set_yscale("log")
        lost = [step for step, loss in enumerate(plain.losses) if not math.isfinite(loss)]
        if lost:
            axes.axvspan(lost[0], len(plain.losses), color=PLAIN, alpha=0.08, label="NaN without a guard")
        finish(figure, axes, name, "loss" if smooth == 1 else f"loss, mean of {smooth}")

    return draw


def curve(axes: Axes, values: list[float], colour: str, label: str, since: int = 0) -> None:
    axes.plot(range(since, len(values)), values[since:], color=colour, linewidth=1, label=label)


def mean_of(values: list[float], count: int) -> list[float]:
    """Each value and those before it, `count` in all."""
    windows = [values[max(0, i + 1 - count) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def mark(axes: Axes, trail: Trail, losses: list[float], since: int = 0) -> None:
    steps = [step for step, _ in trail.acts if step >= since and math.isfinite(losses[step])]
    if steps:
        axes.plot(steps, [losses[step] for step in steps], "^", color=GUARDED, markersize=6, label="the guard acts")


def finish(figure: Any, axes: Axes, name: str, label: str) -> None:
    axes.set_xlabel(axes.get_xlabel() or "step")
    axes.set_ylabel(label)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(IMAGES / f"{name}.png", dpi=90, bbox_inches="tight")


def vanishing(plt: Any, name: str) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    arms = (("sigmoid", deep(nn.Sigmoid, norm=False), PLAIN), ("ReLU and BatchNorm", deep(nn.ReLU, norm=True), GUARDED))
    for label, make, colour in arms:
        trail = Trail.of_run(make, steps=150)
        print(f"  {label}: {trail.summary()}")
        signals = trail.outcomes[0].signals
        assert signals is not None
        weights = [norm for key, norm in zip(signals.names, signals.norms, strict=True) if norms_a_matrix(key, label)]
        print(f"    gradient norm of the first layer {weights[0]:.2g}, of the last {weights[-1]:.2g}")
        axes.plot(range(1, len(weights) + 1), weights, "o-", color=colour, markersize=4, linewidth=1, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("layer, from the input")
    finish(figure, axes, name, "gradient norm, step 0")


def norms_a_matrix(name: str, label: str) -> bool:
    """Weights of linear layers; in the net with norms every third module is one."""
    number, kind = name.split(".")
    return kind == "weight" and int(number) % (3 if "Norm" in label else 2) == 0


def rates(plt: Any, name: str) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    for lr, colour in ((1e-7, THIRD), (1e-5, PLAIN), (3e-3, GUARDED)):
        trail = Trail.of_run("regression", steps=400, lr=lr)
        print(f"  {lr:g}: {trail.summary()}")
        curve(axes, mean_of(trail.losses, 20), colour, f"learning rate {lr:g}", 20)
    axes.set_yscale("log")
    finish(figure, axes, name, "loss, mean of 20")


def warmups(plt: Any, name: str) -> None:
    """From the stored rows of benchmarks/post_ln.py."""
    rows = [json.loads(line)["row"] for line in (ROOT / "benchmarks/results/post_ln.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    for row in rows:
        if row["norm"] == "post" and row["num_steps"] == 600:
            steps = row["warmup_steps"]
            colour = {0: PLAIN, 100: THIRD, 200: GUARDED}[steps]
            label = f"warm-up {steps} steps" if row["seed"] == 100 else None
            axes.plot(range(0, 601, 100), row["seen"], "o-", color=colour, markersize=3, linewidth=1, label=label)
    finish(figure, axes, name, "held-out loss")


def scale(plt: Any, name: str) -> None:
    fault = {"kind": "fp16-overflow", "at": 200, "for": 12}
    _, guarded = twins("clusters", steps=300, fault=fault, training={"mixed_precision": "fp16"})
    scales = guarded.of(lambda signals: signals.scale)
    print(f"    scale {scales[199]:g} before, {scales[-1]:g} after")
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    curve(axes, scales, GUARDED, "loss scale")
    told = [step for step, what in guarded.warnings if what == "loss-scale"]
    axes.plot(told, [scales[step] for step in told], "v", color=PLAIN, label="loss-scale warns")
    axes.axvspan(200, 212, color=FAULT, alpha=0.3, label="gradients overflow")
    axes.set_yscale("log", base=2)
    finish(figure, axes, name, "loss scale")


def zeros(plt: Any, name: str) -> None:
    fault = {"kind": "fp16-underflow", "at": 150, "for": "ever"}
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    for precision, colour in (("fp16", PLAIN), ("bf16", GUARDED)):
        trail = Trail.of_run("clusters", steps=300, fault=fault, training={"mixed_precision": precision})
        print(f"  {precision}: {trail.summary()}")
        norms = trail.of(lambda signals: max(signals.grad_norm, 1e-4))
        curve(axes, norms, colour, f"{precision}: gradient norm")
        for step, what in trail.warnings:
            if what == "zero-gradient":
                axes.plot([step], [norms[step]], "v", color=colour, label="zero-gradient warns")
    axes.axvline(150, color=FAULT, linestyle=":", label="gradients too small for fp16 from here")
    axes.set_yscale("log")
    finish(figure, axes, name, "norm (0 drawn at 1e-4)")


def held_out(plt: Any, name: str) -> None:
    trail = Trail.of_run("epochs", steps=3000, look_every=50, lr=3e-3)
    print(f"  {trail.summary()}")
    best = min(trail.held_out, key=lambda pair: pair[1])
    print(f"    best held-out {best[1]:.3g} at step {best[0]}")
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    curve(axes, mean_of(trail.losses, 50), THIRD, "training loss, mean of 50")
    axes.plot(*zip(*trail.held_out, strict=True), color=PLAIN, linewidth=1, label="held-out loss")
    axes.plot([best[0]], [best[1]], "^", color=GUARDED, label="best weights")
    finish(figure, axes, name, "loss")


def policy(plt: Any, name: str) -> None:
    fault = {"kind": "lr-scale", "at": 200, "factor": 1000, "for": "ever"}
    trail = Trail.of_run("policy", steps=300, mode="observe", fault=fault, metrics=policy_metrics())
    print(f"  without: {trail.summary()}")
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    for what, detector, colour in (("kl", "kl-blow-up", PLAIN), ("entropy", "entropy-collapse", GUARDED)):
        values = [max(value, 1e-6) for value in trail.of(lambda signals, what=what: signals.metrics[what])]  # type: ignore[misc]
        print(f"    {what}: {values[199]:.2g} at step 199, {values[-1]:.2g} at the end")
        curve(axes, values, colour, what)
        for step, said in trail.warnings:
            if said == detector:
                axes.plot([step], [values[step]], "v", color=colour, label=f"{detector} warns")
    axes.axvline(200, color=FAULT, linestyle=":", label="learning rate x 1000")
    axes.set_yscale("log")
    finish(figure, axes, name, "nats")


FIGURES: dict[str, Callable[[Any, str], None]] = {
    "nan-loss": pair("gpt", steps=300, fault={"kind": "bad-loss", "at": 200, "for": 5}, since=20),
    "exploding-gradients": pair(
        "clusters", steps=300, fault={"kind": "grad-scale", "at": 200, "factor": 1e4}, log=True
    ),
    "vanishing-gradients": vanishing,
    "loss-spike": pair("clusters", steps=300, fault={"kind": "shuffled-labels", "at": 200, "for": 3}),
    "slow-divergence": pair("clusters", steps=500, fault={"kind": "lr-creep", "at": 150, "growth": 1.02}, log=True),
    "learning-rate-too-high": pair(
        "gpt", steps=300, fault={"kind": "lr-scale", "at": 200, "factor": 100, "for": "ever"}, since=20
    ),
    "learning-rate-too-low": rates,
    "short-warmup": warmups,
    "poisoned-moments": pair(
        "regression",
        steps=800,
        since=400,
        smooth=25,
        log=True,
        fault={"kind": "moments-scale", "at": 600, "factor": 1e4, "moments": ["exp_avg_sq"]},
    ),
    "fp16-overflow": scale,
    "fp16-underflow": zeros,
    "bad-batch": pair(
        "regression", steps=300, log=True, fault={"kind": "data-scale", "at": 200, "factor": 1000, "part": 1}
    ),
    "flipped-bit": pair("clusters", steps=300, fault={"kind": "bit-flip", "at": 200}),
    "dead-units": pair("clusters", steps=300, fault={"kind": "dead-relus", "at": 200}),
    "oscillation": pair(sharp(0.5), steps=400, since=50),
    "overfitting": held_out,
    "policy-drift": policy,
}


def main() -> None:
    quiet()
    plt = pyplot()
    plt.rcParams.update({"font.size": 9})
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or FIGURES:
        print(name, flush=True)
        FIGURES[name](plt, name)
        plt.close("all")


if __name__ == "__main__":
    main()
