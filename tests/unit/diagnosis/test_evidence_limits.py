"""Each sign at its limit: with a little less of it, or without what it rests on, it is silent."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from steadystep.diagnosis import batch_evidence, data_evidence, learning_evidence, model_evidence, output_evidence
from steadystep.diagnosis.causes import Cause, Fault
from steadystep.diagnosis.explain import advised, as_measured
from steadystep.diagnosis.facts import Facts, Setup
from steadystep.diagnosis.learning import base_of
from steadystep.diagnosis.measured import Measured
from steadystep.diagnosis.ranking import proven
from steadystep.diagnosis.rules import EVIDENCE_RULES, FAULT_RULES
from steadystep.records import Diagnosis, Plan, Signals, WeightStats
from tests.unit.diagnosis import made
from tests.unit.diagnosis.test_mechanisms import FALLS, FLAT, outputs, part, run

Sign = Callable[[Facts], str]


def with_target(losses: list[float] = FLAT, *, seen: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """A run whose loss compares its outputs with this target."""
    return run(
        losses,
        seen=outputs(target=part("['target']", **changes), **seen or {}),
        parts=(part("[0]", whole=False), part(**changes)),
    )


CONSTANT = {"smallest": 2.0, "largest": 2.0, "std": 0.0, "variance": 0.0, "entropy": 0.0, "values": 1}
ONE_KIND = {"entropy": 1.386, "entropy_within": 0.01}
FAR = {"whole": False, "mean": 500.0, "std": 20.0, "entropy": 0.0}


@pytest.mark.parametrize(
    ("sign", "said", "silent"),
    [
        (data_evidence.constant_targets, with_target(**CONSTANT), with_target(**CONSTANT | {"rows": 1})),
        (data_evidence.constant_targets, with_target(**CONSTANT), with_target(**CONSTANT | {"ignored": 1.0})),
        (batch_evidence.one_kind_per_batch, with_target(rows=8, **ONE_KIND), with_target(rows=7, **ONE_KIND)),
        (
            data_evidence.far_targets,
            with_target([1e5 - step for step in range(256)], seen={"kind": "mse", "rms": 10.0}, **FAR),
            with_target([1e5 * 0.98**step for step in range(256)], seen={"kind": "mse", "rms": 10.0}, **FAR),
        ),
        (
            data_evidence.far_targets,
            with_target([1e5 - step for step in range(256)], seen={"kind": "mse", "rms": 10.0}, **FAR),
            with_target([1e5 - step for step in range(256)], seen={"kind": "mse", "rms": 300.0}, **FAR),
        ),
        (
            data_evidence.outside_of_domain,
            with_target(seen={"kind": "bce"}, smallest=-1.0, largest=1.0),
            with_target(seen={"kind": "bce"}, smallest=0.0, largest=1.0),
        ),
        (
            output_evidence.constant_outputs,
            run(seen=outputs(distinct=0.01)),
            run(seen=outputs(distinct=0.01, input_spread=0.0)),
        ),
        (
            output_evidence.out_of_reach,
            with_target(seen={"kind": "mse", "activation": "sigmoid", "smallest": 0.0}, mean=9.0, std=1.0),
            with_target(seen={"kind": "cross-entropy", "activation": "sigmoid", "smallest": 0.0}, mean=9.0, std=1.0),
        ),
        (
            output_evidence.out_of_reach,
            with_target(seen={"kind": "mse", "activation": "sigmoid", "smallest": 0.0}, mean=9.0, std=1.0),
            with_target(FALLS, seen={"kind": "mse", "activation": "sigmoid", "smallest": 0.0}, mean=9.0, std=1.0),
        ),
    ],
)
def test_a_sign_and_its_limit(sign: Sign, said: Facts, silent: Facts) -> None:
    assert sign(said)
    assert sign(silent) == ""


def test_what_is_said_of_outputs_names_their_range_and_share() -> None:
    assert output_evidence.constant_outputs(run(seen=outputs(distinct=0.01))).startswith("99% of the 32 samples")
    seen = {"kind": "mse", "activation": "sigmoid", "smallest": 0.0}
    assert "targets around 9" in output_evidence.out_of_reach(with_target(seen=seen, mean=9.0, std=1.0))


def test_a_loss_without_a_floor_falls_as_a_whole() -> None:
    episodes = [0.5, -0.3, 0.8, -2.0] * 14 + [0.4, -11.6, 0.7, -1.9]  # sums over the episodes of a policy gradient
    assert output_evidence.bottomless(made.facts(episodes)) == ""
    falls = [0.5 - 0.01 * step**2 for step in range(60)]
    found = output_evidence.bottomless(made.facts(falls))
    assert found == "the loss fell from 0.5 to -34.31 and on: nothing bounds it from below"
    assert output_evidence.bottomless(made.facts(falls + [-20.0] * 20)) == ""  # it has come to rest above that


@pytest.mark.parametrize(("fan_in", "said"), [(3, False), (4, True)])
def test_layers_of_three_inputs_have_no_usual_gain(fan_in: int, said: bool) -> None:
    initial = WeightStats(names=("0.weight",), rms=(30.0,))
    layers = run(initial=initial, structure={"fan_ins": (fan_in, fan_in)})
    assert bool(model_evidence.unusual_gains(layers)) is said


@pytest.mark.parametrize("kind", ["bce", "bce with logits"])
def test_the_base_of_two_classes_is_their_entropy(kind: str) -> None:
    two = part(smallest=0.0, largest=1.0, binary=0.6, entropy=0.0)
    assert base_of(kind, two) == (0.6, "the entropy of the labels")
    assert base_of("hinge embedding", two)[1] != "the entropy of the labels"


def test_wrong_calls_are_saved() -> None:
    measured = Measured()
    for _ in range(3):
        measured.outputs.add(outputs(mistakes=(("inner softmax-axis", "over one element"),)), 1.4)
    saved = json.loads(json.dumps(measured.outputs.state_dict()))
    again = Measured().outputs
    again.load_state_dict(saved)
    assert again.wrong == measured.outputs.wrong != {}


def test_advice_stands_where_nothing_was_done() -> None:
    diagnosis = Diagnosis(cause=Cause.BAD_BATCH.value, advice="as it was")
    signals = Signals(step=1, loss=1.0, grad_norm=1.0)
    assert advised(diagnosis, signals, Plan(), Setup()) is diagnosis
    assert advised(diagnosis, signals, Plan(actions=("skip-step",)), Setup()).advice != "as it was"


@pytest.mark.parametrize(
    ("signals", "setup"),
    [({"batch_rms": 1.0}, False), ({"input_finite": True}, False), ({}, True)],
)
def test_a_batch_was_given_or_is_said_to_be(signals: dict[str, Any], setup: bool) -> None:
    seen = Signals(step=1, loss=1.0, grad_norm=1.0, **signals)
    assert as_measured(Setup(gives_batch=setup), seen).gives_batch
    assert not as_measured(Setup(), Signals(step=1, loss=1.0, grad_norm=1.0)).gives_batch


def test_every_rule_has_a_cause_a_weight_and_a_sign() -> None:
    for rule in (*EVIDENCE_RULES, *FAULT_RULES):
        assert isinstance(rule.cause, Cause), rule
        assert rule.fault is None or isinstance(rule.fault, Fault), rule
        assert rule.weight > 0.0, rule
        assert callable(rule.sign), rule


def test_what_is_proven_names_its_fault() -> None:
    made = run(seen=outputs(mistakes=(("inner softmax-axis", "over one element"),)))
    assert any(fault == Fault.SOFTMAX_AXIS for _, fault in proven(made))
    assert not learning_evidence.idle(run())
