"""Row 14: the same seeded program was handled otherwise on a busy machine: what is kept depended on the clock."""

import itertools
import random
import time
from collections.abc import Callable

import pytest

from steadystep.records import Outcome
from tests.seen.broken import nan_weights, train
from tests.seen.tasks import NoisyRegression
from tests.seen.twins import Drive, run


def _idle() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * 1e-5


def _busy() -> Callable[[], float]:
    """Now and then somebody else has the processor for 20 ms."""
    dice, now = random.Random(3), [0.0]

    def clock() -> float:
        now[0] += 0.02 if dice.random() < 0.3 else 1e-5
        return now[0]

    return clock


def _interventions(outcomes: list[Outcome]) -> list[tuple[object, ...]]:
    return [(o.step, o.plan.actions, o.plan.to, o.restored) for o in outcomes if not o.plan.proceeds]


def _under(clock: Callable[[], float], program: Callable[[], list[Outcome]]) -> list[tuple[object, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("perf_counter", "monotonic", "process_time", "thread_time"):
            patch.setattr(time, name, clock)
        patch.setattr(time, "perf_counter_ns", lambda: int(clock() * 1e9))
        return _interventions(program())


def test_a_rollback_is_the_same_on_a_busy_machine() -> None:
    """A small classifier, Adam 3e-3, no batch=; a weight becomes NaN at step 500. The clock is ours."""

    def program() -> list[Outcome]:
        return train(520, fault=nan_weights(500))

    quiet = _under(_idle(), program)
    assert quiet
    assert _under(_busy(), program) == quiet


@pytest.mark.slow
def test_a_noisy_run_is_treated_the_same_on_a_busy_machine() -> None:
    """Row 1's regression, lr 0.05, noise 0.3, batches of 32, and one of 8 that is too high a rate."""
    for size in (32, 8):

        def program(size: int = size) -> list[Outcome]:
            return list(run(NoisyRegression(0.05, 0.3, size), 1, Drive("guard")).outcomes)

        assert _under(_busy(), program) == _under(_idle(), program)
