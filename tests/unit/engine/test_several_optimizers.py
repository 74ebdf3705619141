"""Several optimizers under one guard: one decision, and none of them steps, goes back or is saved alone."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

import steadystep
from steadystep.errors import MisuseError
from steadystep.optimizers import CombinedOptimizer, as_one
from tests.loops import batches, small_net, squared


def pair(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return [Muon(matrices, lr=0.01), AdamW(vectors, lr=0.003)]


def bits(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    return dict(leaves([model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)], ""))


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, tree.detach().clone() if isinstance(tree, Tensor) else tree


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]) if isinstance(value, Tensor) else value == right[name], name


def test_a_nan_in_the_part_of_one_stops_all() -> None:
    model = small_net(dropout=0.0)
    optimizers = pair(model)
    guard = steadystep.Guard(model, optimizers)
    for step, x in enumerate(batches(12)):
        before = bits(model, optimizers)
        handle = model[-1].bias.register_hook(lambda g: g * math.nan) if step == 7 else None  # AdamW's
        outcome = guard.step(lambda x: squared(model, x), batch=x)
        assert outcome.stepped == (step != 7)
        if handle is not None:
            handle.remove()
            assert_same(bits(model, optimizers), before)
    assert guard.updates == 11


def test_a_run_that_was_saved_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def run(steps: slice, *, resume: bool) -> dict[str, Any]:
        model = small_net()
        optimizers = pair(model)
        make = steadystep.Guard.resume if resume else steadystep.Guard
        guard = make(model, optimizers, run_dir=tmp_path / "run", config={"monitoring": {"save_checkpoints": True}})
        for x in batches(30)[steps]:
            guard.step(lambda x: squared(model, x), batch=x)
        guard.save()
        guard.close()
        return bits(model, optimizers)

    run(slice(0, 12), resume=False)
    resumed = run(slice(12, 30), resume=True)
    model = small_net()
    optimizers = pair(model)
    with steadystep.Guard(model, optimizers) as guard:
        for x in batches(30):
            guard.step(lambda x: squared(model, x), batch=x)
    assert_same(resumed, bits(model, optimizers))


def test_one_schedule_and_one_ceiling_for_all() -> None:
    model = small_net()
    optimizers = pair(model)
    guard = steadystep.Guard(model, optimizers, schedule=lambda updates: 1.0 / (1.0 + updates))
    used: list[list[float]] = []
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda o, *_: used.append([group["lr"] for group in o.param_groups]))
    for step, x in enumerate(batches(3)):
        if step == 2:
            guard._parts.learning_rate.ceiling.limit(0.001, hold=None)
        guard.step(lambda x: squared(model, x), batch=x)
    assert used == [[0.01], [0.003], [0.005], [0.0015], [pytest.approx(0.001)], [pytest.approx(0.0003)]]


def test_sparse_and_dense_gradients() -> None:
    def run(*, damaged: bool) -> tuple[dict[str, Any], list[steadystep.Outcome]]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"table": nn.Embedding(30, 6, sparse=True), "body": nn.Linear(6, 1)})
        table, body = model["table"], model["body"]
        optimizers = [torch.optim.SparseAdam(table.parameters(), lr=0.01), torch.optim.Adam(body.parameters(), lr=0.01)]
        guard = steadystep.Guard(model, optimizers)
        outcomes = []
        for step in range(64):
            ids = torch.randint(0, 30, (16,), generator=torch.Generator().manual_seed(step))
            if damaged and step == 52:
                with torch.no_grad():
                    body.weight[0, 0] = math.nan
            outcomes.append(
                guard.step(lambda ids: (body(table(ids)).squeeze(-1) - ids / 30).square().mean(), batch=ids)
            )
        return bits(model, optimizers), outcomes

    whole, _ = run(damaged=False)
    mended, outcomes = run(damaged=True)
    (back,) = [outcome for outcome in outcomes if outcome.restored is not None]
    assert back.exact
    assert_same(mended, whole)


def test_what_cannot_be_meant_is_said() -> None:
    model, other = small_net(), nn.Linear(2, 2)
    first, second = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    both = nn.ModuleList([model, other])
    with pytest.raises(MisuseError, match="no optimizer"):
        steadystep.Guard(both, [])
    with pytest.raises(MisuseError, match=r"optimizer 1 must be a torch.optim.Optimizer, got Sequential"):
        steadystep.Guard(both, [first, model])  # type: ignore[list-item]
    with pytest.raises(MisuseError, match="optimizer 1 is in the list twice"):
        steadystep.Guard(both, [first, first])
    with pytest.raises(MisuseError, match=r"SGD and AdamW both hold a parameter of shape \[16x6\]"):
        steadystep.Guard(both, [first, AdamW(model.parameters(), lr=0.1)])
    held = steadystep.Guard(other, second)
    with pytest.raises(MisuseError, match="already has a guard"):
        steadystep.Guard(both, [first, second])
    held.close()
    guard = steadystep.Guard(both, [first, second])
    for optimizer in (first, second):
        with pytest.raises(MisuseError, match="already has a guard"):
            steadystep.Guard(both, optimizer)
    guard.close()
    steadystep.Guard(model, first).close()


def test_a_list_of_one_is_that_one_and_the_state_of_several_is_in_the_form_of_torch() -> None:
    model = small_net()
    optimizers = pair(model)
    assert as_one(optimizers[:1]) is optimizers[0]
    one = as_one(optimizers)
    assert isinstance(one, CombinedOptimizer)
    squared(model, batches(1)[0]).backward()
    one.step()
    saved = one.state_dict()
    assert sorted(saved["state"]) == list(range(sum(1 for _ in model.parameters())))
    assert [i for group in saved["param_groups"] for i in group["params"]] == sorted(saved["state"])
    other = small_net(seed=1)
    fresh = pair(other)
    as_one(fresh).load_state_dict(saved)
    assert_same(bits(model, fresh), bits(model, optimizers))
    with pytest.raises(MisuseError, match="call add_param_group on the one"):
        one.add_param_group({})
