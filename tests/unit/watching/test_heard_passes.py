"""Forward passes that a loop makes by itself are measured at probes, as those inside a closure are."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

import steadystep
from steadystep.signals.loss_calls import LossRecorder
from steadystep.watching import collected
from steadystep.watching.recorder import Recorder

Loss = Callable[[Tensor, Tensor], Tensor]


def _batches(number: int = 160) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    centers = 2.0 * torch.randn(4, 10, generator=generator)
    for _ in range(number):
        y = torch.randint(4, (32,), generator=generator)
        yield centers[y] + torch.randn(32, 10, generator=generator), y


def _network(last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4), last)


def _watched(model: nn.Module, lr: float = 0.05, number: int = 160) -> steadystep.Guard:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    watcher = steadystep.watch(model, optimizer)
    for x, y in _batches(number):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return watcher.guard


def _given(model: nn.Module, lr: float = 0.05, number: int = 160) -> steadystep.Guard:
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=lr))
    for x, y in _batches(number):
        guard.step(F.cross_entropy(model(x), y))
    return guard


@pytest.mark.parametrize("run", [_watched, _given])
def test_a_wrong_loss_is_named_in_any_style_of_loop(run: Callable[..., steadystep.Guard]) -> None:
    assert run(_network(nn.Softmax(dim=1))).diagnose()[0].fault == "wrong-loss"
    healthy = run(_network(nn.Identity())).diagnose()[0]
    assert healthy.cause == "healthy"
    assert "the entropy of the labels" in healthy.evidence  # so the loss function is known


@pytest.mark.parametrize("run", [_watched, _given])
def test_inputs_and_targets_are_measured(run: Callable[..., steadystep.Guard]) -> None:
    facts = run(_network(nn.Identity()), number=40)._parts.run_history.facts()
    assert facts.inputs is not None
    assert facts.measured.batch is not None
    assert [part.name for part in facts.measured.batch.parts] == ["['input']", "['target']"]
    assert facts.measured.outputs.loss == ("cross-entropy", "['target']")
    assert facts.probe is not None
    assert facts.probe.modules == ("1",)  # the ReLU, for dead units


def test_no_hook_and_no_mode_is_left() -> None:
    model = _network(nn.Identity())
    guard = _given(model, number=9)  # step 9 is not due
    assert not model._forward_pre_hooks
    assert not any(module._forward_hooks for module in model.modules())
    assert LossRecorder.at_work == 0
    assert torch._C._len_torch_function_stack() == 0
    guard.close()


def test_a_model_is_copied_and_saved_while_a_pass_is_open() -> None:
    model = _network(nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = steadystep.Guard(model, optimizer)
    (x, y), *_ = _batches(1)
    guard.step(F.cross_entropy(model(x), y))
    output = model(x)  # of step 1, which is due
    assert LossRecorder.at_work == 1
    twin = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    assert torch.equal(twin(x), output)
    guard.close()
    assert LossRecorder.at_work == 0
    assert torch._C._len_torch_function_stack() == 0


def test_the_pass_of_another_network_is_not_taken_for_ours() -> None:
    torch.manual_seed(0)
    maker, critic = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (maker, critic)]
    watchers = [steadystep.watch(each, own) for each, own in zip((maker, critic), optimizers, strict=True)]
    for _ in range(20):
        made = maker(torch.randn(8, 3))
        for own in optimizers:
            own.zero_grad()
        F.binary_cross_entropy_with_logits(critic(made.detach()), torch.zeros(8, 1)).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic(made).mean().backward()
        optimizers[0].step()
    seen = [watcher.guard._parts.run_history.facts().measured.outputs for watcher in watchers]
    assert seen[0].count == 0  # its pass was followed by the critic's backward first
    assert seen[1].count > 0
    assert LossRecorder.at_work == 0


def test_updates_at_probes_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    plain = Recorder.micro_batches

    def counted(self: Recorder, passes: int) -> Any:
        found = plain(self, passes)
        kept.append(len(found))
        return found

    monkeypatch.setattr(Recorder, "micro_batches", counted)
    _watched(_network(nn.Identity()), number=12)
    assert kept == [1] * 12


def test_a_mode_that_the_loop_enters_meanwhile_stays() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model = _network(nn.Identity())
    guard = _given(model, number=1)
    (x, y), *_ = _batches(1)
    output = model(x)
    with Mode():
        guard.step(F.cross_entropy(output, y))
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0


def test_a_pass_without_gradients_is_not_measured() -> None:
    model = _network(nn.Identity())
    guard = _given(model, number=1)
    (x, y), *_ = _batches(1)
    with torch.no_grad():
        model(100.0 * x)
    guard.step(F.cross_entropy(model(x), y))
    guard.step(F.cross_entropy(model(x), y))
    first = guard._parts.run_history.facts().measured.outputs.first
    assert first is not None
    assert first.step == 1
    assert first.largest < 20.0


def test_clipping_of_another_model_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "is_sharded", lambda tensors: bool(list(tensors)))  # as if all were DTensors
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with steadystep.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)) as watcher:
        model(torch.ones(4, 2)).mean().backward()
        other(torch.ones(4, 2)).mean().backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        assert not watcher._seen.touched
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert watcher._seen.touched
