"""Whatever was put around `step` or `zero_grad` is called; torch's own range only when somebody profiles."""

import functools
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from steadystep import Guard, optimizers


def made(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return kind([parameter], lr=0.1)  # type: ignore[call-arg]


def weights(optimizer: torch.optim.Optimizer) -> list[float]:
    values: list[float] = optimizer.param_groups[0]["params"][0].tolist()
    return values


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_the_same_update_as_torchs(kind: type[torch.optim.Optimizer]) -> None:
    one, other = made(kind), made(kind)
    one.step()
    optimizers.step(other)
    assert weights(one) == weights(other) != [1.0, 1.0, 1.0]


def test_the_range_is_left_out_and_comes_back_with_a_profiler() -> None:
    optimizer = made()

    def ranges() -> int:
        return sum("Optimizer.step" in event.key for event in profile.key_averages())

    with torch.profiler.profile() as profile:
        optimizers.step(optimizer)
    assert ranges() == 1
    wrapped: Any = type(optimizer).step
    assert wrapped.__code__ is optimizers.WRAPPER  # it is what is left out below; a new torch may have another way


def test_no_profiler_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    real = torch.autograd.profiler.record_function.__enter__
    monkeypatch.setattr(
        torch.autograd.profiler.record_function,
        "__enter__",
        lambda self: (entered.append(self.name), real(self))[1],
    )
    optimizer = made()
    optimizers.step(optimizer)
    assert entered == []
    optimizer.step()
    assert entered == ["Optimizer.step#AdamW.step"]


@pytest.mark.parametrize("where", ["pre", "post", "everywhere before", "everywhere after"])
def test_hooks_are_called(where: str) -> None:
    optimizer = made()
    seen: list[str] = []

    def hook(*_: Any) -> None:
        seen.append(where)

    handle = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "everywhere before": register_optimizer_step_pre_hook,
        "everywhere after": register_optimizer_step_post_hook,
    }[where](hook)
    try:
        optimizers.step(optimizer)
    finally:
        handle.remove()
    assert seen == [where]


def test_a_scheduler_counts_the_calls() -> None:
    optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizers.step(optimizer)
    scheduler.step()  # warns, which is an error here, when it has seen no step


def test_a_patch_of_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Patched(torch.optim.SGD):
        pass

    optimizer = made(Patched)
    seen: list[int] = []
    original: Any = Patched.step

    @functools.wraps(original)
    def step(self: Any, *args: Any) -> Any:
        seen.append(1)
        return original(self, *args)

    monkeypatch.setattr(Patched, "step", step)
    optimizers.step(optimizer)
    assert seen == [1]


def test_a_subclass_is_called() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return super().step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    optimizer = made(Twice)
    optimizers.step(optimizer)
    assert weights(optimizer) == pytest.approx([0.8, 0.8, 0.8])
    optimizers.zero_grad(optimizer)
    assert optimizer.param_groups[0]["params"][0].grad.tolist() == [0.0, 0.0, 0.0]


def test_zero_grad_lets_go_of_gradients() -> None:
    optimizer = made()
    optimizers.zero_grad(optimizer)
    assert optimizer.param_groups[0]["params"][0].grad is None


def test_a_guarded_step_calls_hooks() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    with Guard(model, optimizer) as guard:
        guard.step(lambda: model(torch.ones(4, 2)).square().mean())
    assert seen == [1]
