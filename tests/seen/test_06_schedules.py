"""Row 6: learning rates that the loop or the guard's own settings change brought 33 to 47 warnings in 10,000 steps."""

from typing import Any

import pytest

from tests.seen.schedules import BY_HAND
from tests.seen.tasks import Blobs, InfoNCE, NoisyRegression, SumVAE
from tests.seen.text import CharModel
from tests.seen.twins import Program, assert_untouched, compare

TASKS: dict[str, Program] = {
    "blobs, Adam": Blobs(3e-3, "Adam", 1000),
    "blobs, SGD": Blobs(0.1, "SGD", 1000),
    "regression": NoisyRegression(0.01, 0.1, 32, 1000),
    "makemore": CharModel("makemore", (), 1000),
    "vae": SumVAE(),
    "infonce": InfoNCE(),
}
QUICK = [
    ("blobs, Adam", "restarts"),
    ("blobs, SGD", "one-cycle"),
    *(
        pytest.param(task, schedule, marks=pytest.mark.slow)
        for task, schedule in (("blobs, Adam", "warmup"), ("blobs, SGD", "warmup-cosine"), ("makemore", "triangular"))
    ),
]
OWN: dict[str, dict[str, Any]] = {
    "count": {"warmup_steps": 200},
    "share": {"warmup_steps": 0.1, "lr_scheduler": "cosine", "total_steps": 1000},
    "linear": {"warmup_steps": 100, "lr_scheduler": "linear", "total_steps": 1000},
}


@pytest.mark.parametrize(("task", "schedule"), QUICK)
def test_a_learning_rate_set_by_hand_is_left_alone(task: str, schedule: str) -> None:
    """`group["lr"] = ...` before each of 1,000 steps; the schedules are in schedules.py."""
    assert_untouched(compare(TASKS[task], [0], by_hand=schedule))


@pytest.mark.parametrize(
    ("task", "own"), [pytest.param("blobs, Adam", "count", marks=pytest.mark.slow), ("blobs, SGD", "share")]
)
def test_the_guards_own_schedule_is_no_trouble(task: str, own: str) -> None:
    """`training.warmup_steps` and what follows; the plain twin sets the same rates by hand."""
    assert_untouched(compare(TASKS[task], [0], config={"training": OWN[own]}))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", BY_HAND)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_with_every_schedule_by_hand(task: str, schedule: str) -> None:
    """Six tasks, six schedules, two seeds."""
    assert_untouched(compare(TASKS[task], range(2), by_hand=schedule))


@pytest.mark.slow
@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_with_the_guards_own_schedules(task: str, own: str) -> None:
    """Six tasks, three schedules, two seeds."""
    assert_untouched(compare(TASKS[task], range(2), config={"training": OWN[own]}))
