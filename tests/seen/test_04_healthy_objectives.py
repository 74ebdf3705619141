"""Row 4: nine healthy objectives were warned of, rolled back or halted. PPO, DQN and GAN: rows 2 and 3."""

import pytest

from tests.seen.tasks import BatchesOfOne, ClassesInTurn, GrowingTargets, HeavyTails, InfoNCE, SumVAE
from tests.seen.twins import Program, Way, assert_untouched, compare

OBJECTIVES: dict[str, Program] = {
    "student": HeavyTails("student"),  # noise of infinite variance, mean squared error, Adam 1e-3, batches of 32
    "pareto": HeavyTails("pareto"),
    "growing targets": GrowingTargets(),  # doubled every 200 steps, Adam 3e-3, batches of 32
    "sum vae": SumVAE(),  # the sum over 64 images, Adam 1e-3
    "infonce": InfoNCE(),  # temperature 0.07, Adam 1e-3, batches of 64
    "classes in turn": ClassesInTurn(),  # 30 steps of each class, SGD 0.05, batches of 32
    "batches of one": BatchesOfOne(),  # SGD 0.01 with momentum 0.9
}
SHORT: dict[str, Program] = OBJECTIVES | {"sum vae": SumVAE(300), "infonce": InfoNCE(300)}


QUICK = ("student", "sum vae")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SHORT]
)
def test_a_healthy_objective_is_left_alone(name: str) -> None:
    """1,200 steps (300 of those that are green), one seed, closures; settings above."""
    assert_untouched(compare(SHORT[name], [1]))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["guard", "batch", "watch"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_all_healthy_objectives_are_left_alone(name: str, way: Way) -> None:
    """1,000 to 1,500 steps, three seeds, all ways to be guarded."""
    assert_untouched(compare(OBJECTIVES[name], range(3), way))
