"""Signs of gradients that are zero, losses that wander, terms that drown, stale statistics: each at its limits."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from steadystep.diagnosis import batch_evidence, graph_evidence, model_evidence, step_size_evidence
from steadystep.diagnosis.candidates import NOT_RULED_OUT, with_candidates
from steadystep.diagnosis.learning import is_well_below
from steadystep.diagnosis.ranking import rank
from steadystep.records import BatchStats, Diagnosis
from steadystep.signals.structure import is_as_drawn, structure_of
from tests.unit.diagnosis.limits import At, at_limits, run
from tests.unit.diagnosis.made import finding, tally
from tests.unit.diagnosis.test_mechanisms import part

LEARNED = (1.0, 0.1)
THREE = ("0.weight", "2.weight", "4.weight")


def probed(*zeros: float, updated: tuple[str, ...] = THREE[2:]) -> dict[str, Any]:
    columns = {"names": THREE, "weight_rms": (1.0,) * 3, "update_rms": (0.0, 0.0, 1e-3), "zero_shares": zeros}
    seen: dict[str, Any] = {"measured.touched": set(THREE), "measured.updated": set(updated)}
    return {f"probe.{name}": value for name, value in columns.items()} | seen


def swings(low: float, high: float, share: int) -> dict[str, Any]:
    """One loss in eight of `share` is high, after 64 that are low."""
    return {"losses": [low] * 96 + ([high] * share + [low] * (8 - share)) * 20}


def drowned(value: float, whole: float, size: float = 200.0) -> dict[str, Any]:
    parts = (part("[0]", whole=False), part("[1]"), part("[2]", whole=False, mean=size, std=1.0))
    return {"trail.pairs": [(whole, value)] * 8, "batch": BatchStats(batches=20, parts=parts)}


@at_limits(
    At(
        graph_evidence.never_moved,
        probed(1.0, 1.0, 0.0) | {"structure.trained": THREE},
        {
            "end": LEARNED,
            "updates": (100, 99),
            "opposed": (False, True),
            "loop.turns": (0, 1),
            "structure.half": (0, 1),
            "structure.coarse": (0, 1),
            "structure.rate_zero": ((), THREE[:1]),
            "measured.touched": (..., set(THREE[1:])),
            "measured.updated": [(..., set()), (..., set(THREE[1:]))],
            "probe.zero_shares": [(..., (1.0, 0.99, 0.0)), (..., ())],
        },
    ),
    At(
        graph_evidence.amplified,
        {
            "kind": "cross-entropy",
            "start": 11.0,
            "structure.widths": (16, 16),
            "initial.names": ("0.weight", "2.weight"),
            "initial.rms": (1.0, 0.25),
        },
        {"start": (10.1, 10.0), "initial.rms": ((1.0, 1.0), (1.0, 1.01)), "updates": (100, 99), "end": LEARNED},
    ),
    At(
        model_evidence.stale_statistics,
        {"structure.norm_momentum": 1e-4, "updates": 256},
        {"structure.norm_momentum": [(3.9e-4, 4e-4), (1e-4, 0.0)], "updates": (100, 99)},
    ),
    At(
        model_evidence.drawn_head,
        {"structure.last_untrained": True},
        {
            "structure.last_untrained": (True, False),
            "structure.trained": (("a",), ()),
            "end": (0.51, 0.5),
            "updates": (100, 99),
            "opposed": (False, True),
            "loop.turns": (0, 1),
        },
    ),
    At(
        step_size_evidence.wanders,
        swings(0.5, 2.0, 4),
        {"kind": ("mse", "")},
        also=(
            (swings(0.7, 2.0, 4), swings(0.71, 2.0, 4)),
            (swings(0.5, 1.31, 4), swings(0.5, 1.3, 4)),
            (swings(0.5, 2.0, 4), swings(0.5, 2.0, 2)),
        ),
        relative=True,
    ),
    At(
        step_size_evidence.stunned,
        {"ratio": 0.2, "first.rms": 1.0, "first.spread": 0.5, "last.rms": 1.0, "last.spread": 0.04},
        {
            "ratio": (0.1, 0.09),
            "first.spread": (0.11, 0.1),
            "last.spread": (0.049, 0.05),
            "trail.count": (3, 2),
            "end": LEARNED,
        },
    ),
    At(
        batch_evidence.drowned_term,
        {"kind": "", "outputs.kind": "mse", "outputs.terms": 2} | drowned(1.0, 100.0),
        {
            "last.terms": (2, 1),
            "heard": (True, False),
            "updates": (100, 99),
            "opposed": (False, True),
            "measured.rewarded": (False, True),
            "batch": (..., None),
        },
        also=(
            (drowned(1.0, 51.0), drowned(1.0, 50.0)),
            (drowned(0.8, 100.0), drowned(0.79, 100.0)),
            (drowned(1.0, 100.0, size=21.0), drowned(1.0, 100.0, size=20.0)),
            (drowned(1.0, 100.0), {"trail.pairs": [(100.0, 1.0)] * 3}),
        ),
    ),
    At(is_well_below, {"start": 1.0, "end": 0.6}, {"end": (0.66, 0.67), "kind": ("mse", "")}),
)
def test_a_sign_at_its_limits(row: At) -> None:
    row.check()


def test_a_softmax_over_the_samples_is_told_of_a_run_that_learned() -> None:
    given = {
        "trail.wrong": {"inner softmax-axis": 8},
        "last.mistakes": (("inner softmax-axis", "a softmax: over the samples of the batch"),),
        "last.shape": (16, 4),
        "target.rows": 16,
        "end": 0.1,
    }
    assert graph_evidence.inner_axis(run(given))
    assert not graph_evidence.inner_axis(run(given, **{"target.rows": 4}))
    assert not graph_evidence.inner_axis(run(given, **{"last.mistakes": (("inner softmax-axis", "one element"),)}))


def test_harder_data_are_no_fault_of_a_run_that_has_learned() -> None:
    incidents = {"data-shift": tally(finding("slow-divergence", "warn", step=200))}
    assert rank(run(start=1.0, end=0.5, incidents=incidents))[0].cause == "healthy"
    assert rank(run(start=1.0, end=0.9, incidents=incidents))[0].cause == "data-shift"


@pytest.mark.parametrize(("change", "said"), [(1.0, True), (1.2, False), (0.9, False)])
def test_weights_as_torch_draws_them(change: float, said: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 10)
    with torch.no_grad():
        layer.weight.mul_(change)
    assert is_as_drawn(list(layer.parameters())) is said


def test_weights_that_were_trained_or_drawn_otherwise_are_not_as_torch_draws_them() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 10)
    nn.init.normal_(layer.weight, std=1 / 24)
    assert not is_as_drawn([layer.weight])
    assert not is_as_drawn([layer.bias])
    assert not is_as_drawn([nn.Linear(4, 4).weight])


def test_structure_knows_the_frozen_head_and_the_momentum_of_norms() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=0.01), nn.Linear(16, 8))
    model[2].requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = structure_of(model, optimizer)
    assert found.last_untrained
    assert found.norm_momentum == 0.01
    assert found.widths == (16, 0, 0, 0)
    assert structure_of(model.eval(), optimizer).norm_momentum == 0.0
    model[2].requires_grad_(True)
    assert not structure_of(model, optimizer).last_untrained


def test_candidates_follow_what_was_concluded_and_never_a_healthy_run() -> None:
    stuck = run(ratio=1e-3)
    found = with_candidates((Diagnosis(cause="no-learning", fault="labels-shuffled", evidence="so"),), stuck)
    assert [d.fault or d.cause for d in found] == [
        "labels-shuffled",
        "output-independent-of-input",
        "vanishing-gradient",
    ]
    assert all(d.evidence.startswith(NOT_RULED_OUT) and d.advice for d in found[1:])
    healthy = (Diagnosis(evidence="fine"),)
    assert with_candidates(healthy, stuck) == healthy


def test_no_candidate_that_the_run_rules_out() -> None:
    slow = (Diagnosis(cause="learning-rate-too-low", evidence="so"),)
    assert [d.cause for d in with_candidates(slow, run(ratio=1e-6))] == ["learning-rate-too-low", "vanishing-gradient"]
    high = (Diagnosis(cause="exploding-gradient", evidence="so"),)
    assert "learning-rate-too-high" not in {d.cause for d in with_candidates(high, run(ratio=1e-4))}
    assert "learning-rate-too-high" in {d.cause for d in with_candidates(high, run(ratio=1e-2))}


def test_no_candidates_after_what_was_seen_as_it_is() -> None:
    frozen = run({"structure.norm_momentum": 1e-4})
    found = rank(frozen)
    assert found[0].fault == "batch-dependence"
    assert with_candidates(found[:1], frozen) == found[:1]
