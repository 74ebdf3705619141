"""Optimizers that evaluate the closure themselves: LBFGS."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import steadystep
from tests.loops import batches, squared


def run(
    *, watched: bool = True, bad: tuple[int, ...] = (), from_evaluation: int = 1, search: str | None = None
) -> tuple[list[Tensor], list[bool]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=search)
    watcher = steadystep.watch(model, opt) if watched else None
    stepped = []
    for i, x in enumerate(batches(12)):
        evaluations = 0

        def closure(i: int = i, x: Tensor = x) -> Tensor:
            nonlocal evaluations
            evaluations += 1
            opt.zero_grad()
            loss = squared(model, x) * (math.nan if i in bad and evaluations >= from_evaluation else 1.0)
            loss.backward()
            return loss

        before = [p.detach().clone() for p in model.parameters()], copy.deepcopy(opt.state_dict()["state"])
        opt.step(closure)
        if watcher is not None:
            assert watcher.outcome is not None
            stepped.append(watcher.outcome.stepped)
            assert not watcher.outcome.plan.actions or i in bad
            if i in bad:
                assert all(torch.equal(a, b) for a, b in zip(before[0], model.parameters(), strict=True))
                assert str(before[1]) == str(opt.state_dict()["state"])
    if watcher is not None:
        watcher.remove()
    return [p.detach() for p in model.parameters()], stepped


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_healthy_lbfgs_is_bit_identical_without_an_intervention(search: str | None) -> None:
    plain, _ = run(watched=False, search=search)
    watched, stepped = run(search=search)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert all(stepped)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("evaluation", [1, 3])
def test_a_nan_in_any_evaluation_undoes_the_whole_step(search: str | None, evaluation: int) -> None:
    weights, stepped = run(bad=(4, 5, 8), from_evaluation=evaluation, search=search)
    assert [i for i, taken in enumerate(stepped) if not taken] == [4, 5, 8]
    assert all(bool(w.isfinite().all()) for w in weights)


def test_inspect_judges_lbfgs_by_hand() -> None:
    model = nn.Linear(6, 1)
    opt = torch.optim.LBFGS(model.parameters())
    guard = steadystep.Guard(model, opt)
    for x in (batches(1)[0], batches(1)[0] * math.nan):
        opt.zero_grad()
        loss = squared(model, x)
        loss.backward()
        plan = guard.inspect(loss)
        assert guard.commit(stepped=plan.proceeds).stepped == bool(loss.isfinite())


def far_off(mode: str, steps: int, **recovery: int) -> tuple[nn.Module, list[Tensor], list[steadystep.Outcome]]:
    """Every evaluation is finite, and the step leads to infinity."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 1), nn.BatchNorm1d(1)), batches(1)[0]
    opt = torch.optim.LBFGS(model.parameters(), lr=1e39, max_iter=1)
    before = [t.detach().clone() for t in model.state_dict().values()]
    outcomes = []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = squared(model, x)
        loss.backward()
        return loss

    with steadystep.watch(model, opt, config={"mode": mode, "recovery": recovery}) as watcher:
        for _ in range(steps):
            opt.step(closure)
            assert watcher.outcome is not None
            outcomes.append(watcher.outcome)
    return model, before, outcomes


def test_a_step_that_was_undone_is_reported_as_refused() -> None:
    model, before, outcomes = far_off("autopilot", 3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert [(o.stepped, o.plan.actions) for o in outcomes] == [(False, ("skip-step",))] * 3
    assert outcomes[0].diagnosis.cause == "learning-rate-too-high"
    assert "non-finite" in outcomes[0].diagnosis.evidence


def test_undone_steps_count_in_the_budget() -> None:
    with pytest.raises(steadystep.TrainingHalted, match="skipped 3 updates in a row"):
        far_off("autopilot", 4, max_skips_in_a_row=3)


def test_observe_undoes_nothing() -> None:
    model, _, outcomes = far_off("observe", 1)
    assert not all(bool(p.isfinite().all()) for p in model.parameters())
    assert outcomes[0].stepped
