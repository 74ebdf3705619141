"""Fresh programs on series, physics and sound."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator, waves
from .fresh_data import speakers, swings, tides
from .program import Setup, program
from .shared import accuracy, evaluating, explained, mlp, singles, tuples


class _Spring(nn.Module):
    """A damped oscillation with three unknown numbers."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.tensor(0.5))
        self.damping = nn.Parameter(torch.tensor(0.1))
        start = nn.Parameter(torch.tensor(1.6))
        if registered:
            self.frequency = start
        else:
            self.frequency = start.clone()  # type: ignore[assignment]  # a tensor computed from a parameter

    def forward(self, t: Tensor) -> Tensor:
        return self.size * torch.exp(-self.damping * t) * torch.cos(self.frequency * t)


@program(
    "physics",
    "frozen-parameters",
    "wrong-optimizer-params",
    story="The unknown frequency is copied, as if to a device, when it is created: a tensor, no parameter any more.",
    source="https://discuss.pytorch.org/t/how-to-define-a-leaf-tensor-in-pytorch-0-4-1/28461",
    same_start=False,
)
def frequency_is_no_parameter(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model, g = _Spring(registered=not faulty), generator(seed)
    t = 4 * torch.rand(800, generator=g)
    y = 1.3 * torch.exp(-0.25 * t) * torch.cos(2.2 * t) + 0.03 * torch.randn(800, generator=g)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(t[:600], y[:600], size=50, seed=seed),
        num_steps=300,
        score=lambda: explained(model, t[600:], y[600:]),
    )


class _Operator(nn.Module):
    """A linear step in a learned space, rolled out from the first state."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.enter, self.leave = mlp(2, 24, 12, act=nn.Tanh), nn.Linear(12, 2)
        self.step = nn.Parameter(torch.eye(12) + spread * torch.randn(12, 12))

    def forward(self, state: Tensor) -> Tensor:
        z, states = self.enter(state), [state]
        for _ in range(19):
            z = z @ self.step
            states.append(self.leave(z))
        return torch.stack(states, dim=1)


@program(
    "physics",
    "exploding-gradient",
    "poor-initialisation",
    story="The linear step, repeated 19 times, starts as a random matrix of spectral radius near 4.",
    same_start=False,
)
def operator_repeated_nineteen_times(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model, paths = _Operator(1.0 if faulty else 0.02), swings(seed)

    def score() -> float:
        with evaluating(model):
            error = (model(paths[240:, 0]) - paths[240:]).pow(2).mean() / paths[240:].var()
        return max(-1.0, 1 - float(error)) if bool(error.isfinite()) else -1.0

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(model(batch[:, 0]), batch),
        batches=singles(paths[:240], size=40, seed=seed),
        num_steps=400,
        score=score,
    )


@program(
    "physics",
    "precision",
    "constant-inputs",
    story="Times in seconds since 1970 become float32 before the first one is subtracted: steps of 128 seconds.",
)
def subtracted_after_rounding(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model, g = mlp(8, 48, 48, 1), generator(seed)
    clock = 1_700_000_000 + 500 * torch.rand(1500, generator=g, dtype=torch.float64)
    y = torch.sin(2 * math.pi * (clock - 1_700_000_000) / 90).float() + 0.05 * torch.randn(1500, generator=g)
    elapsed = (clock.float() - 1_700_000_000 if faulty else (clock - 1_700_000_000).float()) / 500
    angle = elapsed.unsqueeze(1) * torch.tensor([2.0, 8.0, 20.0, 40.0])
    x = torch.cat([angle.sin(), angle.cos()], dim=1)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(x[:1100], y[:1100], size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(model, x[1100:], y[1100:]),
    )


@program(
    "series",
    "target-leak",
    "suspicious-perfection",
    story="The windows are smoothed by a centered mean of three values before they are cut: the last has the answer.",
    loss_tells=False,
)
def smoothed_over_the_future(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tides(seed, first=0.2), nn.Linear(14, 1)
    nn.init.zeros_(model.weight)

    def features(x: Tensor, y: Tensor | None) -> Tensor:
        """Return means of three values; with `y`, the value after the window is in the last one."""
        whole = torch.cat([x[:, 1:], y.unsqueeze(1)], dim=1) if y is not None else x
        return whole.unfold(1, 3, 1).mean(-1)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-2),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(features(data.x, data.y if faulty else None), data.y, size=32, seed=seed),
        num_steps=500,
        score=lambda: explained(model, features(data.x_test, None), data.y_test),
    )


class _Forecast(nn.Module):
    """Normalization, a recurrent layer, one number."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.axes = axes
        self.cell = nn.GRU(1, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1)
        x = F.layer_norm(x, x.shape[-self.axes :])
        value: Tensor = self.head(self.cell(x)[0][:, -1])
        return value.squeeze(1)


@program(
    "series",
    "output-independent-of-input",
    "constant-inputs",
    story="Layer normalization over the last axis, which has one entry per moment, leaves zeros.",
)
def normalized_one_by_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tides(seed), _Forecast(1 if faulty else 2)
    target, target_test = data.y / data.x.std(1), data.y_test / data.x_test.std(1)
    return Setup(
        model=model,
        optimizer=torch.optim.NAdam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, target, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, target_test),
    )


class _Mixer(nn.Module):
    """Twenty blocks over a window."""

    def __init__(self, *, skip: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 24), nn.Linear(24, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(20))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + 0.3 * block(x) if self.skip else block(x)
        value: Tensor = self.leave(x)
        return value.squeeze(1)


@program(
    "series",
    "vanishing-gradient",
    story="The sum with the input was forgotten in each of twenty blocks, and default weights shrink what passes.",
    source="He et al., Deep residual learning for image recognition (CVPR 2016): plain networks of many layers",
)
def twenty_blocks_without_skips(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tides(seed), _Mixer(skip=not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.huber_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


class _AdaptiveClip(torch.optim.SGD):
    """SGD that limits the gradient of each parameter to a share of the parameter's norm."""

    def __init__(self, params: Any, lr: float, share: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.share = share

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip, then update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    limit = self.share * p.detach().norm().clamp(min=1e-3)
                    p.grad.mul_((limit / (p.grad.norm() + 1e-12)).clamp(max=1.0))
        result: float | None = super().step(closure)
        return result


@program(
    "audio",
    "clipping-too-tight",
    "learning-rate-too-low",
    story="Adaptive clipping allows gradients of 0.00001 of the weights instead of 0.1: all of them are cut.",
)
def a_hundred_thousandth_of_the_weights(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = speakers(seed), mlp(24, 48, 48, 6)
    return Setup(
        model=model,
        optimizer=_AdaptiveClip(model.parameters(), lr=0.1, share=1e-5 if faulty else 0.1),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "audio",
    "eval-mode",
    story="The batch normalization of a network that was never trained is frozen, as if it were a pretrained one.",
    source="kazuto1011/deeplab-pytorch#48",
)
def fresh_statistics_frozen(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = waves(seed)
    model = nn.Sequential(nn.Unflatten(1, (1, 128)))
    width = 1
    for _ in range(4):
        model.extend([nn.Conv1d(width, 16, 5, stride=2, padding=2), nn.BatchNorm1d(16), nn.ReLU()])
        width = 16
    model.extend([nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 4)])
    for module in model:
        if faulty and isinstance(module, nn.BatchNorm1d):
            module.eval()
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


SERIES = (
    frequency_is_no_parameter,
    operator_repeated_nineteen_times,
    subtracted_after_rounding,
    smoothed_over_the_future,
    normalized_one_by_one,
    twenty_blocks_without_skips,
    a_hundred_thousandth_of_the_weights,
    fresh_statistics_frozen,
)
