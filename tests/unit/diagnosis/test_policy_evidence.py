"""Signs in a policy, each at its limits."""

from typing import Any

from steadystep.diagnosis import policy_evidence as signs
from steadystep.records import BatchStats
from tests.unit.diagnosis.limits import At, at_limits
from tests.unit.diagnosis.test_mechanisms import part

POLICY = {"kind": "", "kind_of": "['reward']", "heard": False}
ACTIONS = (part("[0]", whole=False, shape=(6,)), part("[1]"))


def early(mean: float, batches: int = 16) -> BatchStats:
    """The first batches, of as many as 20."""
    return BatchStats(batches=batches, parts=(part("['reward']", mean=mean),))


def still(zeros: int, first: float = 0.0) -> list[float]:
    """256 gradient norms, of which the last are zero."""
    return [first] * 16 + [1.0] * (240 - zeros) + [0.0] * zeros


def acted(counted: int, batches: int = 20) -> dict[str, Any]:
    signal = part("[2]", whole=False, counted=counted)
    return {"batch": BatchStats(batches=batches, parts=(*ACTIONS, signal))}


@at_limits(
    At(
        signs.flat_reward,
        POLICY | {"target.smallest": 1.0, "target.largest": 1.0},
        {
            "target.smallest": (1.0, 0.9),
            "batch.batches": (6, 5),
            "kind_of": [("['return']", "['label']"), ("advantages", "[1]")],
        },
    ),
    At(
        signs.certain_policy,
        POLICY
        | {"first.entropy": 1.0, "last.entropy": 0.01, "target.mean": 0.5, "target.whole": False}
        | {"measured.early": early(0.5)},
        {
            "first.entropy": (0.31, 0.3),
            "last.entropy": (0.1, 0.11),
            "trail.count": (3, 2),
            "kind_of": (..., "[1]"),
            "measured.early": [(early(0.5, 17), early(0.5, 18)), (..., None)],
            "target.mean": (0.535, 0.536),  # 0.177 is two standard errors of the mean of 4 batches of 32
        },
        also=(
            (
                {"measured.early": early(0.1), "target.mean": 0.1},
                {"measured.early": early(0.099), "target.mean": 0.099},
            ),
            (
                {"measured.early": early(-0.1), "target.mean": -0.1},
                {"measured.early": early(-0.099), "target.mean": -0.099},
            ),
            ({"target.mean": 0.9, "norms": still(65)}, {"target.mean": 0.9, "norms": still(64)}),
        ),
    ),
    At(
        signs.single_visits,
        {"kind": "", "heard": False, "last.policy": True, **acted(32)},
        {"last.policy": (True, False), "updates": (100, 99)},
        also=((acted(32), acted(33)), (acted(12, 6), acted(13, 6)), (acted(12, 6), acted(10, 5)), ({}, acted(0))),
    ),
    At(
        signs.large_rewards,
        POLICY | {"target.mean": 600.0, "warned": ("clip-rate",)},
        {
            "target.mean": [(500.0, 499.0), (-500.0, -499.0)],
            "warned": [(("saturated-units",), ()), (("clip-rate",), ("loss-spike",))],
            "kind_of": (..., "[1]"),
        },
        also=(({"target.mean": 0.0, "target.std": 500.0}, {"target.mean": 0.0, "target.std": 499.0}),),
    ),
    At(
        signs.falling_reward,
        POLICY | {"target.mean": 0.4, "measured.early": early(0.5)},
        {
            "target.mean": (0.429, 0.4293),  # 0.354 is four standard errors
            "target.std": (1.0, 0.0),
            "batch.batches": (19, 18),
            "measured.early": (..., None),
            "kind_of": (..., "[1]"),
        },
    ),
    At(
        signs.uniform_policy,
        POLICY | {"start": -3.0, "end": -3.0, "measured.rewarded": True, "last.entropy": 1.386},
        {
            "last.entropy": (1.373, 1.372),  # of ln 4
            "last.shape": [((32, 4), (4,)), (..., (32, 1))],
            "curve.late": (-2.08, -2.07),
            "curve.noise": (0.15, 0.16),
            "curve": (..., None),
            "updates": (100, 99),
            "trail.count": (3, 2),
        },
        also=(
            ({}, {"measured.rewarded": False, "kind_of": "[1]"}),
            ({}, {"start": 3.0, "end": 3.0, "curve.late": -3.0}),
            (
                {"measured.early": early(0.5), "target.mean": 0.5707},
                {"measured.early": early(0.5), "target.mean": 0.5709},
            ),
        ),
    ),
    At(
        signs.no_signal,
        POLICY | {"norms": still(128)},
        {"norms": [(still(65), still(64)), (..., still(128, first=1.0))], "kind_of": (..., "[1]")},
    ),
)
def test_it_is_said_at_its_limit_and_not_beyond(row: At) -> None:
    row.check()
