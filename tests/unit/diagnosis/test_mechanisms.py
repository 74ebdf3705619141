"""Signs that are measured at probes: each names its fault, and is silent in a run that learns."""

import math
from typing import Any

import pytest

from steadystep.diagnosis.data_evidence import unrelated_targets
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.learning import has_moving_targets
from steadystep.diagnosis.measured import Measured
from steadystep.diagnosis.ranking import rank
from steadystep.records import BatchPartStats, BatchStats, InputStats, OutputStats, Probe, Structure, WeightStats
from tests.unit.diagnosis.made import facts, finding, tally

FLAT = [1.4 + 0.01 * (step % 3) for step in range(256)]
FALLS = [1.4 * 0.98**step for step in range(256)]


def part(name: str = "[1]", **more: Any) -> BatchPartStats:
    plain: dict[str, Any] = {"whole": True, "rows": 32, "mean": 1.5, "std": 1.1, "smallest": 0.0, "largest": 3.0}
    plain |= {"variance": 1.2, "within": 1.0, "entropy": 1.386, "entropy_within": 1.3, "binary": 0.0, "values": 4}
    return BatchPartStats(name=name, **plain | more)


def outputs(**more: Any) -> OutputStats:
    plain: dict[str, Any] = {"step": 1, "shape": (32, 4), "smallest": -1.0, "largest": 1.0, "rms": 1.0, "spread": 1.0}
    plain |= {"input_spread": 1.0, "row_error": 1.0, "column_error": 1.0, "entropy": 1.3, "distinct": 1.0}
    plain |= {"kind": "cross-entropy", "terms": 1, "target": part("['target']")}
    return OutputStats(**plain | more)


def run(
    losses: list[float] = FLAT,
    *,
    seen: OutputStats | None = None,
    parts: tuple[BatchPartStats, ...] = (),
    initial: WeightStats | None = None,
    structure: dict[str, Any] | None = None,
    **more: Any,
) -> Facts:
    """A classifier of four classes with these losses, measured at eight probes."""
    measured, last = Measured(), seen or outputs()
    measured.initial = initial
    measured.batch = BatchStats(batches=20, parts=parts or (part("[0]", whole=False), part()))
    for _ in range(8):
        measured.outputs.add(last, 1.4)
    measured.outputs.matches = {f"{last.kind} of [1]": 8}
    kept = Structure(trained=("0.weight", "2.weight"), **structure or {})
    return facts(losses, measured=measured, structure=kept, ratios=(1e-3,) * 8, highest_ratio=1e-2, **more)


def first(made: Facts) -> str:
    found = rank(made)[0]
    return found.fault or found.cause


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ({"seen": outputs(unlinked=("0.weight",))}, "zero-gradient"),
        ({"seen": outputs(mistakes=(("inner softmax-axis", "over one element"),))}, "softmax-axis"),
        ({"structure": {"last_frozen": True, "frozen": 2}}, "frozen-parameters"),
        ({"structure": {"weight_decay": 5.0, "decoupled": True}, "lrs": [1e-2] * 256}, "regularisation-too-strong"),
        (
            {
                "structure": {"fan_ins": (64, 64)},
                "initial": WeightStats(names=("0.weight", "2.weight"), rms=(1.2, 1.2), std=(1.2, 1.2)),
            },
            "poor-initialisation",
        ),
    ],
)
def test_a_fact_of_the_model_is_a_fault_where_nothing_is_learned(made: dict[str, Any], named: str) -> None:
    assert first(run(**made)) == named
    assert first(run(FALLS, **made)) == "healthy"


def test_ids_that_are_always_the_same() -> None:
    ids = part("[0]", shape=(8,), entropy=0.1, values=1)
    seen = outputs(spread=1.0)
    assert first(run(seen=seen, parts=(ids, part()), structure={"table_rows": 500})) == "constant-inputs"
    assert first(run(seen=seen, parts=(ids, part()), structure={"table_rows": 2})) != "constant-inputs"


@pytest.mark.parametrize(
    ("kind", "low", "high", "wrong"),
    [
        ("bce", 1.0, 2.0, True),
        ("bce with logits", 0.0, 1.0, False),
        ("soft margin", 0.0, 1.0, True),
        ("soft margin", -1.0, 1.0, False),
        ("poisson", -1.0, 3.0, True),
    ],
)
def test_targets_that_a_loss_is_not_defined_for(kind: str, low: float, high: float, wrong: bool) -> None:
    labels = part(smallest=low, largest=high, binary=0.69)
    made = run(FALLS, seen=outputs(kind=kind, target=labels), parts=(part("[0]", whole=False), labels))
    assert (first(made) == "wrong-loss") is wrong


def test_a_schedule_that_only_rises() -> None:
    grows = [1e-3 * 1.03**step for step in range(256)]
    noted = {"loss-spike": tally(finding("loss-spike", "info"))}
    assert first(run(FALLS, lrs=grows, structure={"announced": 1e-3}, noted=noted)) == "schedule-error"
    assert first(run(FALLS, lrs=grows, structure={"announced": 1.0}, noted=noted)) == "healthy"


def test_a_bias_without_gradient_is_no_fault() -> None:
    def without(*names: str) -> dict[str, Any]:
        return {"zero-gradient": tally(finding("zero-gradient", where=names))}

    assert first(run(FALLS, warned=without("4.bias"))) == "healthy"
    assert first(run(FALLS, warned=without("4.weight", "4.bias"))) == "zero-gradient"


def test_text_that_is_learned_by_heart_leaks_only_where_positions_see_later_ones() -> None:
    ids = part("", shape=(16,), entropy=2.5, values=12)
    low = [2.5 * 0.9**step for step in range(256)]
    for ahead, named in (("", "healthy"), ("softmax", "target-leak")):
        assert first(run(low, seen=outputs(ahead=ahead), parts=(ids,))) == named


def test_a_loss_above_that_of_a_constant_is_not_healthy() -> None:
    high = [900.0 * 0.99**step + 20.0 for step in range(256)]
    assert rank(run(high))[0].cause == "poor-initialisation"  # it began far above as well
    slow = [9.0 * 0.999**step for step in range(256)]
    assert rank(run(slow))[0].cause == "no-learning"


def policy(then: float, now: float, **more: Any) -> Facts:
    """A policy whose rewards had the mean `then` in the first 16 batches, and `now` in the next 8."""
    measured = Measured()
    rewards = {"whole": False, "std": 0.5, "largest": 1.0}
    measured.early = BatchStats(batches=16, parts=(part("['reward']", mean=then, **rewards),))
    mean = (16 * then + 8 * now) / 24
    measured.batch = BatchStats(batches=24, parts=(part("['reward']", mean=mean, **rewards),))
    for _ in range(8):
        measured.outputs.add(outputs(kind="", terms=0, target=None, **more), 0.1)
    return facts([-3.0 if more else 0.1] * 256, measured=measured, ratios=(1e-3,) * 8)


def test_a_policy_that_earns_less_and_less() -> None:
    assert first(policy(0.4, 0.1)) == "wrong-loss"
    assert first(policy(0.1, 0.4)) == first(policy(0.4, 0.39)) == "healthy"


def test_a_policy_that_stays_uniform_under_a_loss_of_entropy() -> None:
    assert first(policy(0.1, 0.1, entropy=1.386)) == "regularisation-too-strong"
    assert first(policy(0.1, 0.1, entropy=1.2)) == "healthy"


def test_inputs_that_the_loss_scales_before_the_model_sees_them_are_not_raw() -> None:
    raw = InputStats(batches=4, mean=50.0, std=900.0, largest=5e3, constant_share=0.0, scale_spread=20.0, finite=True)
    assert first(run(inputs=raw)) == "unscaled-data"
    assert first(run(inputs=raw, seen=outputs(input_rms=900.0))) == "unscaled-data"
    assert first(run(inputs=raw, seen=outputs(input_rms=1.0))) != "unscaled-data"


def test_gradients_that_are_cleared_every_few_updates_are_accumulated() -> None:
    def cleared(losses: list[float], every: int) -> Facts:
        made = run(losses)
        made.measured.loop.carried, made.measured.loop.renewed = 256 - 256 // every, 256 // every
        return made

    assert first(cleared(FALLS, 4)) == "healthy"
    assert first(cleared(FALLS, 16)) == first(cleared(FLAT, 4)) == "missing-zero-grad"


def test_moments_that_were_lost_once_are_forgiven_where_the_run_learned() -> None:
    lost = tally(finding("lost-moments"))
    assert first(run(FALLS, warned={"lost-moments": lost})) == "healthy"
    assert first(run(FLAT, warned={"lost-moments": lost})) == "lost-moments"
    often = run(FALLS)
    often.measured.loop.renewed, often.measured.loop.emptied = 255, 85  # after every third update
    assert first(often) == "lost-moments"


def test_targets_that_spread_out_are_not_judged_by_their_level() -> None:
    """A curriculum: the loss rises with its targets."""

    def grown(factor: float) -> Facts:
        made = run([0.5 + step / 200 for step in range(256)], seen=outputs(kind="mse", target=_spread(1.0)))
        made.measured.outputs.add(outputs(kind="mse", target=_spread(factor)), 1.4)
        return made

    assert has_moving_targets(grown(2.0))
    assert not has_moving_targets(grown(1.2))
    assert has_moving_targets(grown(0.5))


def _spread(std: float) -> BatchPartStats:
    return part("['target']", whole=False, mean=0.0, std=std, entropy=math.nan, variance=std**2)


def test_a_last_tensor_that_is_always_the_same_is_no_target_of_a_run_that_learns() -> None:
    """As with the lengths that CTC takes."""
    lengths = part("[2]", smallest=4.0, largest=4.0, std=0.0)

    def with_lengths(losses: list[float]) -> Facts:
        made = run(losses, seen=outputs(kind="", terms=1), parts=(part("[0]", whole=False), part(), lengths))
        made.measured.outputs.matches = {}
        return made

    assert first(with_lengths(FLAT)) == "constant-targets"
    assert first(with_lengths(FALLS)) == "healthy"


def test_a_loss_a_little_below_that_of_a_constant_is_all_there_may_be_to_learn() -> None:
    wavers = [0.15 * (step % 3 - 1) for step in range(256)]
    assert unrelated_targets(run([1.38 + w for w in wavers]))
    assert not unrelated_targets(run([1.35 + w for w in wavers]))


def test_weights_whose_gradient_is_always_zero() -> None:
    probe = Probe(step=200, names=("0.weight", "2.weight"), weight_rms=(0.1, 0.1), update_rms=(0.0, 1e-3))

    def stopped(**structure: Any) -> Facts:
        made = run(probe=probe, structure=structure, seen=outputs(distinct=0.01))
        made.measured.touched, made.measured.updated = {"0.weight", "2.weight"}, {"2.weight"}
        return made

    assert first(stopped()) == "zero-gradient"  # and not that its outputs are all the same
    assert first(stopped(coarse=2)) != "zero-gradient"  # updates of 16-bit weights are rounded away
