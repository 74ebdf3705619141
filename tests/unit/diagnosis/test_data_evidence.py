"""Signs in targets and inputs, each at its limits."""

from steadystep.diagnosis import data_evidence as signs
from steadystep.records import BatchStats
from tests.unit.diagnosis.limits import At, at_limits, run
from tests.unit.diagnosis.test_mechanisms import part

LEARNED = (1.0, 0.1)  # the loss of the second half: at a constant's, and far below
NUMBERS = {"target.whole": False}
NUMBERED = {"target.whole": True, "target.smallest": 0.0, "target.largest": 3.0, "target.values": 4}
TOKENS = {"kind": "cross-entropy", "target.shape": (8,), "target.entropy": 1.6, "last.ahead": "softmax", "end": 0.1}
IDS = {"input.shape": (8,), "input.whole": True, "input.values": 2, "structure.table_rows": 11}
SUPERVISED = {"kind": ("mse", ""), "opposed": (False, True), "measured.rewarded": (False, True)}


def rising(noise: float) -> list[float]:
    """From 10 to 11.5, with an error of an eighth of the noise at the end."""
    return [10.0] * 192 + [11.5 + noise, 11.5 - noise] * 32


WAVES = {"losses": [0.9, 1.1] * 128}


@at_limits(
    At(
        signs.constant_targets,
        {"target.smallest": 2.0, "target.largest": 2.0},
        {
            "target.largest": (2.0, 2.1),
            "batch.batches": (6, 5),
            "last.terms": (1, 2),
            "last.compared": (False, True),
            "last.passes": (1, 2),
            "target.ignored": (0.9, 1.0),
            "trail.last": (..., None),
            **SUPERVISED,
        },
        also=(({"target.rows": 8, "batch.batches": 8}, {"target.rows": 9, "batch.batches": 7}),),
    ),
    At(
        signs.ignored_targets,
        {"target.ignored": 1.0},
        {"target.ignored": (1.0, 0.99), "target.whole": (True, False), "batch.batches": (6, 5)},
    ),
    At(
        signs.unrelated_targets,
        {"ratio": 1e-3},
        {
            "ratio": [(3e-4, 2.9e-4), (0.099, 0.1), (..., None)],
            "target.variance": [(0.81, 0.8), (1.02, 1.03)],
            "kind": ("mse", ""),
        },
        also=((WAVES, WAVES | {"batch.batches": 1}),),  # of one batch the base is not known well
        relative=True,
    ),
    At(
        signs.small_updates,
        {"ratio": 1e-4},
        {
            "ratio": [(2.9e-4, 3e-4), (1e-9, 0.0), (..., None)],
            "updates": (100, 99),
            "target.variance": (1.0, 1.1),
            "kind": ("mse", ""),
        },
        also=(({"end": 0.75, "target.variance": 0.5}, {"end": 0.74, "target.variance": 0.5}),),
        relative=True,
    ),
    At(
        signs.collapsed,
        {"ratio": 0.2},
        {"ratio": [(0.1, 0.099), (..., None)], "target.variance": (1.0, 1.1), "kind": ("mse", "")},
        relative=True,
    ),
    At(
        signs.ended_above_start,
        {"end": 4.0},
        {"end": (3.0, 2.99), **SUPERVISED},
        also=(
            ({"start": 10.0, "end": 11.01, "target.variance": 0.3}, {"start": 10.0, "end": 11.0}),
            (
                {"losses": rising(2.9), "target.variance": 0.3},
                {"losses": rising(3.1), "target.variance": 0.3},
            ),
            ({"kind": "l1", "end": 1.2, "target.deviation": 0.0}, {"kind": "l1", "end": 1.2}),
        ),
        relative=True,
    ),
    At(
        signs.far_targets,
        NUMBERS | {"target.mean": 100.0, "outputs.rms": 10.0},
        {
            "target.mean": [(100.0, 99.9), (-100.0, -99.9)],
            "target.whole": (False, True),
            "outputs.rms": (50.0, 50.1),
            "end": (0.5, 0.49),
            "updates": (50, 49),
            **SUPERVISED,
        },
        also=(({"target.mean": 0.0, "target.std": 100.0}, {"target.mean": 0.0, "target.std": 99.9}),),
        relative=True,
    ),
    At(
        signs.raw_inputs,
        {"inputs.mean": 20.0},
        {
            "inputs.mean": [(20.0, 19.9), (-20.0, -19.9)],
            "outputs.input_rms": (2.0, 1.9),
            "updates": (100, 99),
            "end": LEARNED,
            "kind": ("mse", ""),
        },
        also=(({"inputs.mean": 0.0, "inputs.std": 20.0}, {"inputs.mean": 0.0, "inputs.std": 19.9}),),
        relative=True,
    ),
    At(
        signs.constant_inputs,
        {"input.shape": (8,), "input.smallest": 3.0},
        {
            "input.smallest": (3.0, 2.9),
            "input.shape": ((1,), ()),
            "input.whole": (False, True),
            "outputs.shape": ((2, 4), (1, 4)),
            "batch.batches": (6, 5),
            "trail.count": (3, 2),
            "end": LEARNED,
        },
        also=(
            (
                {"target.shape": (8,), "target.whole": False},
                {"target.shape": (8,), "target.whole": False, "target.smallest": 3.0, "input.smallest": 2.9},
            ),
        ),
    ),
    At(
        signs.constant_inputs,
        IDS,
        {
            "input.values": [(2, 3), (1, 0)],
            "structure.table_rows": (11, 10),
            "input.whole": (True, False),
            "input.shape": ((1,), ()),
            "batch.batches": (6, 5),
        },
        also=(
            ({"target.shape": (8,), "target.values": 50}, {"input.values": 50, "target.values": 2}),
            ({}, {"batch.parts": (part("[0]", shape=(8,), values=2), part("[2]", shape=(8,), values=9), part())}),
        ),
    ),
    At(
        signs.constant_inputs,
        {"first.input_spread": 0.0, "last.input_spread": 0.0},
        {"first.input_spread": (0.0, 0.1), "last.input_spread": (0.0, 0.1)},
    ),
    At(
        signs.leaked_target,
        TOKENS | {"batch.shifted": True},
        {
            "target.shape": [((8,), (7,)), ((8,), (8, 8))],
            "target.entropy": (1.51, 1.5),
            "target.whole": (True, False),
            "last.ahead": ("softmax", ""),
            "updates": (2000, 2001),
            "end": (1.5, 1.6),
            "batch.shifted": (True, False),
            "batch.parts": (..., ()),
            "trail.last": (..., None),
        },
        also=(({"kind": "", "end": 0.16}, {"kind": "", "end": 0.161}),),
    ),
    At(
        signs.leaked_target,
        TOKENS | {"batch.parts": (part(shape=(8,), entropy=1.6),)},
        {"end": (0.16, 0.161), "updates": (2000, 2001)},
    ),
    At(
        signs.tiny_targets,
        NUMBERS | {"target.std": 9e-4},
        {
            "target.std": [(9e-4, 1e-3), (1e-9, 0.0)],
            "target.mean": (-9e-4, -1e-3),
            "target.variance": (1.0, 0.0),
            "target.whole": (False, True),
            "updates": (100, 99),
            "end": (0.1, 0.099),
            **SUPERVISED,
        },
        relative=True,
    ),
    At(
        signs.wide_targets,
        NUMBERS | {"target.std": 60.0},
        {
            "target.std": (50.0, 49.9),
            "target.variance": (1.0, 0.0),
            "target.whole": (False, True),
            "warned": (("loss-spike",), ("clip-rate",)),
            "end": LEARNED,
            **SUPERVISED,
        },
        relative=True,
    ),
    At(
        signs.numbered_classes,
        NUMBERED | {"target.entropy": 1.386, "outputs.shape": (32, 1)},
        {
            "updates": (100, 99),
            "end": (0.3, 0.29),
            "target.variance": (1.0, 0.0),
            "target.whole": (True, False),
            "target.smallest": (0.0, 1.0),
            "target.largest": (3.0, 4.0),
            "target.entropy": (1.25, 1.24),
            "target.shape": ((), (1,)),
            "outputs.shape": ((32,), (32, 2)),
            "kind": [("l1", "cross-entropy"), ("huber", "")],
        },
        also=(
            (
                {"target.values": 100, "target.largest": 99.0, "target.entropy": 4.6},
                {"target.values": 101, "target.largest": 100.0, "target.entropy": 4.6},
            ),
            ({}, {"target.values": 3, "target.largest": 2.0}),
            ({"target.variance": 2.0, "end": 0.6}, {"target.variance": 2.0, "end": 0.59}),
        ),
    ),
    At(
        signs.outside_of_domain,
        {"kind": "bce", "target.smallest": -0.5, "target.largest": 0.5},
        {
            "target.smallest": (-0.011, -0.01),
            "batch.batches": (3, 2),
            "target.largest": (0.5, -0.5),
            "kind": [("bce with logits", "mse"), ("poisson", "soft margin")],
        },
    ),
    At(
        signs.outside_of_domain,
        {"kind": "", "last.kind": "bce", "target.largest": 2.0},
        {"target.largest": (1.011, 1.01), "heard": (True, False)},
    ),
    At(
        signs.outside_of_domain,
        {"kind": "soft margin", "target.smallest": -0.4, "target.largest": 1.0},
        {
            "target.smallest": (-0.4, -0.5),
            "kind": [("hinge embedding", "l1"), ("cosine embedding", "kl"), ("margin ranking", "mse")],
        },
        also=(({}, {"kind": "poisson", "target.smallest": 0.0}),),
    ),
    At(
        signs.copied_target,
        {"last.copied": "feature 3"},
        {
            "last.copied": ("feature 3", ""),
            "trail.count": (4, 3),
            "opposed": (False, True),
            "measured.rewarded": (False, True),
        },
    ),
)
def test_it_is_said_at_its_limit_and_not_beyond(row: At) -> None:
    row.check()


def test_six_batches_are_enough_to_call_something_constant() -> None:
    assert [signs.num_batches(run(batch=None)), signs.num_batches(run())] == [0, 20]
    assert [signs.enough_batches(run({"batch.batches": count})) for count in (5, 6)] == [False, True]


def test_a_part_is_found_by_its_name() -> None:
    batch = BatchStats(batches=1, parts=(part("[0]"), part("[1]")))
    assert signs.part_named(batch, "[1]") is batch.parts[1]
    assert signs.part_named(batch, "[2]") is None
