"""Signs in how batches are made, each at its limits."""

import math

from steadystep.diagnosis import batch_evidence as signs
from tests.unit.diagnosis.limits import At, at_limits, run
from tests.unit.diagnosis.test_mechanisms import part

LEARNED = (1.0, 0.1)  # the loss of the second half: at a constant's, and far below
SAMPLES = {"input.shape": (8,), "input.rows": 16, "input.values": 0, "input.counted": 96, "input.distinct": 16}
KINDS = {"kind": "cross-entropy", "target.rows": 8, "target.entropy": 1.0, "target.entropy_within": 0.08}
KINDS["last.terms"] = 2
TWO = KINDS | {
    "last.terms": 1,
    "target.entropy": 0.5,
    "target.entropy_within": 0.01,
    "losses": [1.0] * 128 + [0.1] * 127 + [2.1],
}
FEW = {"input.shape": (8,), "input.counted": 128, "input.distinct": 6, "input.values": 0} | {
    "target.whole": False,
    "target.values": 0,
    "target.counted": 128,
    "target.distinct": 64,
}


def noisy(noise: float, *, end: float = 1.0) -> dict[str, object]:
    return {"end": end, "curve.noise": noise}


@at_limits(
    At(
        signs.same_batch,
        {"input.repeated": True, "target.repeated": True},
        {
            "batch.batches": (6, 5),
            "batch.parts": [
                ((part(repeated=True, whole=False),), ()),
                ((part(repeated=True, shape=(8,)),), (part(repeated=True),)),  # one class number for each sample
            ],
            "target.repeated": (True, False),
            "input.smallest": (2.9, 3.0),
        },
    ),
    At(
        signs.few_samples,
        SAMPLES,
        {
            "batch.batches": (6, 5),
            "opposed": (False, True),
            "input.shape": ((1,), ()),
            "input.whole": (False, True),
            "input.distinct": [(2, 1), (16, 17)],
            "input.values": (0, 2),
            "input.counted": (96, 95),
            "first.input_spread": (math.nan, 0.0),
        },
        also=(
            ({"input.rows": 17, "input.counted": 102}, {"input.rows": 17, "input.counted": 101}),
            (
                {"input.rows": 70, "input.counted": 420, "input.distinct": 64},
                {"input.rows": 70, "input.counted": 420, "input.distinct": 65},
            ),
            (
                {"target.whole": False, "target.counted": 0, "target.distinct": 17},
                {"target.whole": False, "target.counted": 96, "target.distinct": 17},
            ),
            (
                {"target.whole": False, "target.counted": 96, "target.distinct": 16},
                {"target.whole": False, "target.counted": 96, "target.distinct": 17},
            ),
        ),
    ),
    At(
        signs.few_inputs,
        FEW,
        {
            "input.counted": [(128, 127)],
            "input.distinct": (6, 7),
            "input.whole": (False, True),
            "input.shape": ((1,), ()),
            "input.values": (0, 1),
            "target.values": (0, 1),
            "target.whole": (False, True),
            "target.distinct": (64, 63),
            "opposed": (False, True),
            "end": LEARNED,
        },
    ),
    At(
        signs.constant_part,
        {"kind": "", "heard": False, "target.smallest": 3.0, "target.rows": 8},
        {
            "target.smallest": (3.0, 2.9),
            "target.rows": (8, 7),
            "batch.batches": (6, 5),
            "target.shape": ((), (1,)),
            "target.ignored": (0.0, 0.1),
            "opposed": (False, True),
            "measured.rewarded": (False, True),
            "kind": ("", "mse"),
            "end": LEARNED,
        },
    ),
    At(
        signs.tiny_batch,
        {"target.rows": 4, "curve.noise": 0.2},
        {"target.rows": (4, 5), "curve.noise": (0.2, 0.19), "updates": (100, 99)},
        also=((noisy(0.5), noisy(0.5, end=0.1)),),
    ),
    At(
        signs.small_normed_batch,
        {"structure.norms": 1, "input.rows": 3, "curve.noise": 0.2},
        {
            "structure.norms": (1, 0),
            "input.rows": [(1, 0), (3, 4)],
            "curve.noise": (0.2, 0.19),
            "updates": (100, 99),
            "batch.parts": ((part(rows=3),), ()),
        },
        also=((noisy(0.5), noisy(0.5, end=0.1)),),
    ),
    At(
        signs.one_kind_per_batch,
        KINDS,
        {
            "target.entropy": (0.81, 0.8),
            "target.entropy_within": (0.1, 0.11),
            "target.rows": (8, 7),
            "batch.batches": (6, 5),
            "opposed": (False, True),
            "end": LEARNED,
        },
    ),
    At(
        signs.one_kind_per_batch,
        TWO,
        {
            "kind": [("nll", "mse"), ("bce", "l1"), ("bce with logits", "huber"), ("cross-entropy", "kl")],
            "last.terms": (1, 2),
            "losses": ([1.0] * 128 + [0.1] * 127 + [2.1], [1.0] * 128 + [0.1] * 127 + [2.0]),
            "target.entropy_within": (0.05, 0.051),
        },
        also=(
            (
                {"target.entropy": 0.051, "target.entropy_within": 0.0},
                {"target.entropy": 0.05, "target.entropy_within": 0.0},
            ),
        ),
    ),
)
def test_it_is_said_at_its_limit_and_not_beyond(row: At) -> None:
    row.check()


def test_without_batches_nothing_is_said_of_them() -> None:
    for sign in (signs.same_batch, signs.few_samples, signs.few_inputs, signs.constant_part, signs.small_normed_batch):
        assert sign(run(batch=None)) == ""


def test_a_loss_that_jumps_between_classes_is_seen_over_32_late_losses() -> None:
    for updates, said in ((64, True), (63, True), (62, False)):
        halves = {"losses": [0.4] * (updates // 2) + [0.5] * (updates - updates // 2)}
        assert bool(signs.one_kind_per_batch(run(TWO | halves))) is said, updates
