"""Unseen programs on time series: an electric load, signals fitted as functions of time."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR

from .data import Split, generator, split
from .program import Setup, program
from .shared import evaluating, explained, mlp, tuples
from .unseen_data import load, surface


class _Forecaster(nn.Module):
    def __init__(self, squash: bool = False) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 24, batch_first=True), nn.Linear(24, 1)
        self.squash = squash

    def forward(self, window: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(window.unsqueeze(-1))[0][:, -1]).squeeze(-1)
        return out.tanh() if self.squash else out


@program(
    "series",
    "unscaled-data",
    "saturation",
    story="An LSTM gets the load in megawatts, around 30,000: every gate is saturated.",
    source="UMLAUT (Schoop et al., CHI 2021), input data exceeds typical limits",
)
def load_in_megawatts(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = load(seed), _Forecaster()
    scale, shift = (4_000.0, 30_000.0) if faulty else (1.0, 0.0)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x * scale + shift, data.y, size=48, seed=seed),
        num_steps=250,
        score=lambda: explained(model, data.x_test * scale + shift, data.y_test),
    )


@program(
    "series",
    "wrong-loss",
    "unscaled-targets",
    "saturation",
    story="The forecast comes out of a tanh, and the values to forecast lie between 2 and 8.",
    source="https://github.com/pytorch/examples/pull/250",
)
def forecast_out_of_a_tanh(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = load(seed), _Forecaster(squash=faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=lambda batch: F.smooth_l1_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y + 5, size=48, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test + 5),
    )


@program(
    "series",
    "wrong-loss",
    "exploding-gradient",
    "dead-units",
    "zero-gradient",
    story="The variance of a Gaussian forecast comes out of a ReLU; where it is zero, the likelihood divides by 1e-6.",
)
def variance_out_of_a_relu(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = load(seed), mlp(24, 48, 2, act=nn.SiLU)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        mean, raw = model(batch[0]).unbind(-1)
        return F.gaussian_nll_loss(mean, batch[1], raw.relu() if faulty else F.softplus(raw) + 1e-3)

    def score() -> float:
        with evaluating(model):
            return max(-10.0, -float(loss((data.x_test, data.y_test))))

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=250,
        score=score,
    )


@program(
    "series",
    "schedule-error",
    "learning-rate-too-high",
    story="The factor of an exponential schedule is above 1: the learning rate grows by 3 percent per step.",
)
def rate_grows_per_step(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = load(seed), mlp(24, 48, 24, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.8)
    return Setup(
        model=model,
        optimizer=optimizer,
        scheduler=ExponentialLR(optimizer, 1.03 if faulty else 0.998),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "series",
    "schedule-error",
    "learning-rate-too-low",
    story="A plateau scheduler watches the loss in the mode for accuracies: it cuts the rate because the loss falls.",
    source="https://github.com/RMeli/gnina-torch/pull/57",
)
def plateau_in_the_wrong_mode(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = load(seed), _Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    seen: list[float] = []

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        value = F.mse_loss(model(batch[0]), batch[1])
        seen.append(float(value.detach()))
        return value

    def factor(_step: int) -> float:
        best, waited, rate = -math.inf, 0, 1.0
        for value in seen[::3]:
            better = value if faulty else -value
            best, waited = (better, 0) if better > best else (best, waited + 1)
            if waited > (2 if faulty else 40):
                rate, waited = rate * 0.2, 0
        return rate

    return Setup(
        model=model,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, factor),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


def _day(seed: int) -> Split:
    """Times of one day from 0 to 1, and a value that depends on them."""
    g = generator(seed)
    t = torch.rand(1200, 1, generator=g)
    y = torch.sin(2 * math.pi * t) + 0.5 * torch.cos(6 * math.pi * t) + 0.05 * torch.randn(1200, 1, generator=g)
    return split(t, (y / y.std()).squeeze(1))


@program(
    "series",
    "unscaled-data",
    "constant-inputs",
    "precision",
    "exploding-gradient",
    story="The time of day is given in seconds since 1970: all inputs are 1.7e9, give or take a day.",
)
def seconds_since_1970(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = _day(seed), mlp(1, 48, 48, 1, act=nn.SiLU)

    def prepared(t: Tensor) -> Tensor:
        return 1.7e9 + 86_400 * t if faulty else 6 * t - 3

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(prepared(data.x), data.y, size=64, seed=seed),
        num_steps=400,
        score=lambda: explained(model, prepared(data.x_test), data.y_test),
    )


@program(
    "series",
    "batch-size-unfit",
    "learning-rate-too-high",
    story="One noisy sample per batch, with the learning rate that suits 96.",
    source="Humbatova et al., Taxonomy of real faults in deep learning systems (ICSE 2020), batch size",
    loss_tells=False,
)
def one_noisy_sample_at_a_time(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, clean = surface(seed, noise=1.2), surface(seed, noise=0.0)
    model = mlp(5, 32, 1, act=nn.Tanh)
    return Setup(
        model=model,
        optimizer=torch.optim.NAdam(model.parameters(), lr=0.03),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=1 if faulty else 96, seed=seed),
        num_steps=300,
        score=lambda: explained(model, clean.x_test, clean.y_test),
    )


class _Sines(nn.Module):
    """Layers with a sine between them, as they are used to fit signals."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 32), nn.Linear(32, 32), nn.Linear(32, 32)])
        self.out = nn.Linear(32, 1)
        for layer in self.layers[1:]:
            assert isinstance(layer, nn.Linear)
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(6 * layer(x))
        out: Tensor = self.out(x)
        return out


@program(
    "series",
    "poor-initialisation",
    "learning-rate-too-high",
    story="The weights of a network with sine activations are drawn from -2 to 2 instead of a range of about 0.07.",
    source="Sitzmann et al., Implicit neural representations with periodic activation functions (2020)",
    same_start=False,
)
def sines_of_large_weights(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = _day(seed)
    model = _Sines(2.0 if faulty else math.sqrt(6 / 32) / 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return Setup(
        model=model,
        optimizer=optimizer,
        scheduler=OneCycleLR(optimizer, max_lr=2e-3, total_steps=401),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "series",
    "clipping-too-tight",
    "learning-rate-too-low",
    "vanishing-gradient",
    story="A hook clamps every gradient to 1e-5 against spikes that a former version had.",
)
def hooks_clamp_gradients(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = load(seed), mlp(24, 48, 1, act=nn.ELU)
    limit = 1e-5 if faulty else 1.0
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-limit, limit))  # type: ignore[no-untyped-call]
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=250,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


SERIES = (
    load_in_megawatts,
    forecast_out_of_a_tanh,
    variance_out_of_a_relu,
    rate_grows_per_step,
    plateau_in_the_wrong_mode,
    seconds_since_1970,
    one_noisy_sample_at_a_time,
    sines_of_large_weights,
    hooks_clamp_gradients,
)
