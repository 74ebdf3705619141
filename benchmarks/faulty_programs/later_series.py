"""Later programs on series, sounds and equations."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator, series, waves
from .program import Setup, program
from .shared import accuracy, explained, tuples


class Forecaster(nn.Module):
    """An LSTM over a window of values, with a linear layer on its last output."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next value."""
        out, _ = self.lstm(x.unsqueeze(-1))
        y: Tensor = self.linear(out[:, -1]).squeeze(1)
        return y


@program(
    "series",
    "unscaled-targets",
    "unscaled-data",
    story="Prices around 180 are predicted in dollars: the LSTM draws a flat line.",
    source="https://taourl.com/read-2456821.html",
)
def prices_in_dollars(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), Forecaster()
    shift, scale = (180.0, 12.0) if faulty else (0.0, 1.0)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x * scale + shift, data.y * scale + shift, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test * scale + shift, data.y_test * scale + shift),
    )


@program(
    "series",
    "learning-rate-too-low",
    story="A rate of 1e-6 after a run that diverged.",
)
def rate_of_one_millionth(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), Forecaster()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-6 if faulty else 1e-2),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


class _Rectified(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.rnn = nn.RNN(1, 32, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(32, 1)
        with torch.no_grad():
            self.rnn.get_parameter("weight_hh_l0").copy_(gain * torch.eye(32))

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x.unsqueeze(-1))
        y: Tensor = self.out(h[:, -1]).squeeze(1)
        return y


@program(
    "series",
    "exploding-gradient",
    "poor-initialisation",
    "non-finite",
    story="A recurrent network of ReLUs starts with 1.6 times the identity: the state doubles at every other step.",
    source="Le et al., A simple way to initialize recurrent networks of rectified linear units (2015)",
    same_start=False,
)
def recurrent_gain_above_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), _Rectified(1.6 if faulty else 0.8)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "series",
    "target-leak",
    "suspicious-perfection",
    story="The training windows are cut one value too long and end with the value to predict.",
    loss_tells=False,
)
def window_one_value_too_long(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    swing = torch.tensor([1.0, -1.0]).repeat(12)  # a series that changes sign at every step
    x, x_test = data.x * swing, data.x_test * swing
    if faulty:
        x = torch.cat([x[:, 1:], data.y.unsqueeze(1)], dim=1)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, x_test, data.y_test),
    )


class _Listener(nn.Module):
    """Convolutions over a waveform and an average over time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 9, stride=4), nn.ReLU(), nn.Conv1d(16, 24, 5, stride=2), nn.ReLU())
        self.fc = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.conv(x.unsqueeze(1)).mean(-1))
        return scores


@program(
    "audio",
    "repeated-batch",
    "batch-size-unfit",
    story="next(iter(loader)) is called in every step: it is always the first batch of four.",
    loss_tells=False,
)
def loader_restarted_in_every_step(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = waves(seed), _Listener()

    def batches() -> Iterator[tuple[Tensor, ...]]:
        stream = tuples(data.x, data.y, size=4, seed=seed)
        running = stream()
        while True:
            yield next(stream()) if faulty else next(running)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=batches,
        num_steps=400,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "audio",
    "non-finite",
    story="Every clip is divided by its own deviation, and a few clips are silent.",
    source="vanvalenlab/deepcell-toolbox#71",
)
def silence_divided_by_its_deviation(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = waves(seed), _Listener()
    x = data.x.clone()
    x[::97] = 0.0
    eps = 0.0 if faulty else 1e-3

    def prepared(clip: Tensor) -> Tensor:
        return (clip - clip.mean(1, keepdim=True)) / (clip.std(1, keepdim=True) + eps)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(prepared(batch[0])), batch[1]),
        batches=tuples(x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, prepared(data.x_test), data.y_test),
    )


def _oscillator(t: Tensor, length: float) -> Tensor:
    """Return a damped swing over `length`, the same curve in whatever unit time is measured."""
    s = t / length
    return torch.exp(-2 * s) * torch.cos(6 * s)


@program(
    "physics",
    "unscaled-data",
    "saturation",
    "poor-initialisation",
    story="Time goes into a tanh network in milliseconds, 0 to 5,000.",
)
def time_in_milliseconds(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    length = 5000.0 if faulty else 1.0
    g = generator(seed)
    t = torch.rand(800, 1, generator=g) * length
    y = _oscillator(t, length)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    grid = torch.linspace(0, length, 200).unsqueeze(1)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(t, y, size=64, seed=seed),
        num_steps=400,
        score=lambda: explained(model, grid, _oscillator(grid, length)),
    )


@program(
    "physics",
    "precision",
    "non-finite",
    "exploding-gradient",
    story="The second derivative of a solution is a difference quotient with a step of 2e-5, in 32 bits: it is noise.",
)
def difference_of_tiny_steps(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    h = 2e-5 if faulty else 0.03

    def u(x: Tensor) -> Tensor:
        out: Tensor = x * (1 - x) * model(x)
        return out

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        x = batch[0]
        second = (u(x + h) - 2 * u(x) + u(x - h)) / h**2
        return (second + math.pi**2 * torch.sin(math.pi * x)).pow(2).mean()

    points = torch.rand(2000, 1, generator=generator(seed))
    grid = torch.linspace(0, 1, 100).unsqueeze(1)

    def score() -> float:
        with torch.no_grad():
            error = (u(grid) - torch.sin(math.pi * grid)).pow(2).mean() / 0.1
        return max(-1.0, 1 - float(error)) if bool(error.isfinite()) else -1.0

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(points, size=64, seed=seed),
        num_steps=400,
        score=score,
    )


SERIES = (
    prices_in_dollars,
    rate_of_one_millionth,
    recurrent_gain_above_one,
    window_one_value_too_long,
    loader_restarted_in_every_step,
    silence_divided_by_its_deviation,
    time_in_milliseconds,
    difference_of_tiny_steps,
)
