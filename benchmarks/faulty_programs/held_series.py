"""Held programs on time series, sounds, signals and equations."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import Split, generator, recall, series, split, waves
from .program import Setup, program
from .shared import accuracy, explained, mlp, tuples


class _Forecaster(nn.Module):
    """Normalize, read with a GRU and forecast the next value."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.gru = nn.GRU(1, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, window: Tensor) -> Tensor:
        normed = self.norm(window.unsqueeze(-1))
        return self.head(self.gru(normed)[0][:, -1]).squeeze(-1)  # type: ignore[no-any-return]


@program(
    "series",
    "output-independent-of-input",
    "constant-inputs",
    story="LayerNorm over the single channel of a series subtracts every value from itself.",
    same_start=False,
)
def norm_of_one_channel(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = series(seed)
    net = _Forecaster(nn.LayerNorm(1) if faulty else nn.LayerNorm((24, 1)))
    return Setup(
        model=net,
        optimizer=torch.optim.Adamax(net.parameters(), lr=8e-3),
        loss=lambda batch: F.mse_loss(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


def _events(seed: int, count: int = 1200) -> tuple[Tensor, Tensor]:
    """Return the seconds since 1970 of six clicks of a user, as float64, and how hurried the user is."""
    g = generator(seed)
    pace = torch.rand(count, generator=g)
    gaps = (2 + 20 * (1 - pace)).unsqueeze(1) * (0.7 + 0.6 * torch.rand(count, 6, generator=g))
    start = 1.6e9 + 1e6 * torch.rand(count, 1, generator=g, dtype=torch.float64)
    return start + gaps.double().cumsum(1), (pace - 0.5) * 4


@program(
    "series",
    "precision",
    "constant-inputs",
    story="Times in seconds since 1970 become float32 before they are subtracted: gaps below 128 seconds are lost.",
    source="https://github.com/PhilJay/MPAndroidChart/issues/2195",
)
def clocks_in_single_precision(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    times, pace = _events(seed)
    times = times.float() if faulty else times
    gaps = (times.diff(dim=1) / 12).float()
    data = split(gaps, pace)
    net = mlp(5, 24, 24, 1, act=nn.SiLU)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.l1_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


class _NeuralODE(nn.Module):
    """Integrate a learned field with Euler's method from time 0 to 1."""

    def __init__(self, steps: int, dt: float) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(6, 32), nn.ELU(), nn.Linear(32, 6))
        self.head = nn.Linear(6, 2)
        self.steps, self.dt = steps, dt

    def forward(self, x: Tensor) -> Tensor:
        state = F.pad(x, (0, 4))
        for _ in range(self.steps):
            state = state + self.dt * self.field(state)
        return self.head(state)  # type: ignore[no-any-return]


def _rings(seed: int, count: int = 1000) -> Split:
    g = generator(seed)
    y = torch.randint(0, 2, (count,), generator=g)
    angle = 2 * math.pi * torch.rand(count, generator=g)
    radius = 0.8 + y + 0.15 * torch.randn(count, generator=g)
    return split(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), y)


@program(
    "ode",
    "exploding-gradient",
    "non-finite",
    story="The solver of a neural ODE takes forty steps of length 1 where the whole way has length 1.",
    source="https://github.com/stevenygd/PointFlow/issues/4",
)
def steps_of_length_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = _rings(seed)
    net = _NeuralODE(40, dt=1.0 if faulty else 1 / 40)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "physics",
    "unscaled-data",
    "saturation",
    story="A network with tanh solves an equation in metres, from 0 to 1000; its inputs are not brought to -1..1.",
    source="https://github.com/vsitzmann/siren/issues/19",
)
def coordinates_in_metres(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    length = 1000.0
    net = mlp(1, 32, 32, 1, act=nn.Tanh)

    def u(x: Tensor) -> Tensor:
        return net(x if faulty else 2 * x / length - 1)  # type: ignore[no-any-return]

    def exact(x: Tensor) -> Tensor:
        return torch.sin(2 * math.pi * x / length)

    def residual(x: Tensor) -> Tensor:
        """Return how far u'' + k^2 sin is from zero, in units of k^2, and the error at sensors."""
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(u(x).sum(), x, create_graph=True)
        wanted = torch.cos(2 * math.pi * x.detach() / length)
        physics = (slope * length / (2 * math.pi) - wanted).pow(2).mean()
        sensors = torch.linspace(0, length, 9).unsqueeze(1)
        return 0.1 * physics + F.mse_loss(u(sensors), exact(sensors))

    def collocation() -> Iterator[Tensor]:
        g = generator(seed)
        while True:
            yield length * torch.rand(64, 1, generator=g)

    def score() -> float:
        x = torch.linspace(0, length, 200).unsqueeze(1)
        with torch.no_grad():
            return 1 - float(F.mse_loss(u(x), exact(x)) / exact(x).var())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=residual,
        batches=collocation,
        num_steps=500,
        score=score,
    )


class _LSTMCellByHand(nn.Module):
    """An LSTM written out gate by gate."""

    def __init__(self, inputs: int, width: int, forget_bias: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(inputs + width, 4 * width) / math.sqrt(inputs + width))
        self.b = nn.Parameter(torch.zeros(4 * width))
        self.out = nn.Parameter(torch.randn(width, 4) / math.sqrt(width))
        self.width, self.forget_bias = width, forget_bias

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), self.width)
        for token in x.unbind(1):
            i, f, g, o = (torch.cat([token, h], dim=1) @ self.w + self.b).chunk(4, dim=1)
            c = torch.sigmoid(f + self.forget_bias) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h @ self.out


@program(
    "sequence",
    "vanishing-gradient",
    "poor-initialisation",
    story="The forget bias of an LSTM written by hand is subtracted: its cells forget at once what stood first.",
    source="https://github.com/craffel/nntools/issues/19",
)
def forget_bias_subtracted(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = recall(seed, length=24)
    cell = _LSTMCellByHand(4, 24, forget_bias=-3.0 if faulty else 3.0)
    return Setup(
        model=cell,
        optimizer=torch.optim.RMSprop(cell.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(cell(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(cell, data.x_test, data.y_test),
    )


class _ComplexFilter(nn.Module):
    """Two complex matrices with a ReLU on both parts between them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(size, 48, dtype=torch.cfloat) / math.sqrt(size))
        self.second = nn.Parameter(torch.randn(48, size, dtype=torch.cfloat) / math.sqrt(48))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.first
        return torch.complex(hidden.real.relu(), hidden.imag.relu()) @ self.second


@program(
    "audio",
    "wrong-loss",
    story="The error of a complex spectrum is squared without its conjugate: real and imaginary error cancel out.",
    loss_tells=False,
)
def square_of_a_complex_error(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed)
    mixing = torch.randn(16, 16, dtype=torch.cfloat, generator=g) / 4
    x = torch.randn(1000, 16, dtype=torch.cfloat, generator=g)
    data = split(x, x @ mixing)
    net = _ComplexFilter(16)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        error = net(batch[0]) - batch[1]
        return (error * error if faulty else error * error.conj()).mean().abs()  # type: ignore[no-any-return]

    def score() -> float:
        with torch.no_grad():
            return -float((net(data.x_test) - data.y_test).abs().pow(2).mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=4e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=score,
    )


@program(
    "audio",
    "unscaled-data",
    "exploding-gradient",
    "non-finite",
    story="Waves are read with scipy as 16-bit integers, up to 32767, and go into the network as they are.",
    source="https://github.com/JusperLee/Dual-Path-RNN-Pytorch/issues/16",
)
def sixteen_bit_waves(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = waves(seed)
    scale = 32767.0 if faulty else 1.0
    encoder = nn.Sequential(nn.Conv1d(1, 16, 16, stride=8), nn.PReLU(), nn.Conv1d(16, 16, 3), nn.PReLU())
    net = nn.Sequential(nn.Unflatten(1, (1, 128)), encoder, nn.AdaptiveMaxPool1d(2), nn.Flatten(), nn.Linear(32, 4))
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(scale * data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, scale * data.x_test, data.y_test),
    )


SERIES = (
    norm_of_one_channel,
    clocks_in_single_precision,
    steps_of_length_one,
    coordinates_in_metres,
    forget_bias_subtracted,
    square_of_a_complex_error,
    sixteen_bit_waves,
)
