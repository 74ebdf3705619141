"""Small models and the plain loops everybody writes: what a guarded run is compared with."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[nn.Module, Tensor], Tensor]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def small_net(seed: int = 0, *, dropout: float = 0.1) -> nn.Module:
    """BatchNorm and dropout: buffers that change and random numbers that must not shift."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 1),
    )


def batches(count: int, seed: int = 1) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 6, generator=rng) for _ in range(count)]


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(-1) - x.sum(-1)).square().mean()


def plain_run(
    model: nn.Module,
    optimizer: Optimizer,
    data: Sequence[Tensor],
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
    bf16: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    loss_fn: Loss = squared,
) -> list[float]:
    """The loop without us."""
    losses, torch_scaler = [], scaler or torch.amp.GradScaler("cpu", enabled=False)
    dtype = torch.bfloat16 if bf16 else torch.float16
    optimizer.zero_grad()
    for i, x in enumerate(data):
        with torch.autocast("cpu", dtype=dtype, enabled=bf16 or scaler is not None):
            loss = loss_fn(model, x)
        scaled = loss / accumulate if accumulate > 1 else loss
        torch_scaler.scale(scaled).backward()
        losses.append(loss.item())
        if (i + 1) % accumulate:
            continue
        torch_scaler.unscale_(optimizer)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        torch_scaler.step(optimizer)
        torch_scaler.update()
        optimizer.zero_grad()
    return losses


def full_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor a loop owns: parameters, buffers, moments."""
    state = {f"model.{k}": v.detach().clone() for k, v in model.state_dict().items()}
    for number, slots in optimizer.state_dict()["state"].items():
        for key, value in slots.items():
            state[f"optimizer.{number}.{key}"] = torch.as_tensor(value).detach().clone()
    return state


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bit-identical, NaN equal to NaN."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        same = torch.equal(value, right[name]) or (
            value.is_floating_point() and bool(((value == right[name]) | (value.isnan() & right[name].isnan())).all())
        )
        assert same, f"{name} differs by up to {(value.double() - right[name].double()).abs().max()}"


def is_finite(state: dict[str, Tensor]) -> bool:
    return all(bool(v.isfinite().all()) for v in state.values() if v.is_floating_point())
