"""Rows as the faulty runs leave them, without the runs."""

from typing import Any


def row(
    arm: str, score: float, *, trial: str = "", seed: int = 0, task: str = "clusters", **rest: Any
) -> dict[str, Any]:
    return {
        "kind": "run",
        "task": task,
        "seed": seed,
        "arm": arm,
        "trial": trial,
        "precision": "fp32",
        "num_steps": 480,
        "noticed": None,
        "said": "",
        "acted": None,
        "did": {},
        "alarms": {},
        "start": 200,
        "score": score,
        "finite": score == score,
        "stopped": "",
        "lost": 0,
        "lr": 1.0,
        "curve": {},
        **rest,
    }


def twins(seed: int = 0, task: str = "clusters", worst: float = 1.03) -> list[dict[str, Any]]:
    """A clean run of score 1, and two that miss a batch."""
    return [
        row("clean", 1.0, seed=seed, task=task),
        row("missing-0", 0.99, seed=seed, task=task),
        row("missing-1", worst, seed=seed, task=task),
    ]
