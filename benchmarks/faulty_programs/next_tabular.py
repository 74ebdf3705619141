"""Next programs on tables, most in the style of a question on a forum."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import Split, digits, friedman, generator, split, table
from .program import LoopFaults, Setup, program
from .shared import accuracy, binary_accuracy, explained, mlp, tuples


@program(
    "tabular",
    "wrong-loss",
    "output-independent-of-input",
    story="The predictions are (N, 1) and the targets (N,): the loss compares every row with every other.",
    source="timeseriesAI/tsai#22",
)
def every_row_with_every_other(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed)
    net = mlp(8, 32, 32, 1)
    y = data.y if faulty else data.y.unsqueeze(1)
    criterion = nn.MSELoss()
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: criterion(net(batch[0]), batch[1]),
        batches=tuples(data.x, y, size=32, seed=seed),
        num_steps=400,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "poor-initialisation",
    "zero-gradient",
    story="Every weight of the network is set to zero before training; only the last bias can learn.",
    source="junxnone/tio#959",
    same_start=False,
)
def all_weights_at_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("wine")
    model = nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 3))

    def init_weights(m: nn.Module) -> None:
        if isinstance(m, nn.Linear) and faulty:
            nn.init.constant_(m.weight, 0.0)
            nn.init.constant_(m.bias, 0.0)

    model.apply(init_weights)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "learning-rate-too-low",
    story="Adadelta comes over from Keras with its new default rate of 0.001; the paper and PyTorch mean 1.",
)
def adadelta_from_keras(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    return Setup(
        model=model,
        optimizer=torch.optim.Adadelta(model.parameters(), lr=1e-3 if faulty else 1.0, rho=0.95, eps=1e-6),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "unscaled-targets",
    "learning-rate-too-low",
    story="House prices of some hundred thousand are predicted as they are, with Adam at 0.001.",
    loss_tells=False,
)
def prices_as_they_are(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 10)
    factor, shift = (90_000.0, 310_000.0) if faulty else (1.0, 0.0)
    net = mlp(8, 48, 48, 1)
    y, y_test = factor * data.y + shift, factor * data.y_test + shift
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-3),
        loss=lambda batch: F.huber_loss(net(batch[0]).squeeze(-1), batch[1]),
        batches=tuples(data.x, y, size=64, seed=seed),
        num_steps=500,
        score=lambda: explained(net, data.x_test, y_test),
    )


@program(
    "tabular",
    "learning-rate-too-high",
    "exploding-gradient",
    "non-finite",
    "wrong-loss",
    story="The loss was changed to reduction='sum', and the rate of SGD that fitted the mean stayed.",
)
def summed_at_the_rate_of_the_mean(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 20)
    net = mlp(8, 32, 1, act=nn.Tanh)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(net(batch[0]).squeeze(1), batch[1], reduction="sum" if faulty else "mean")

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=loss,
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


def visits(seed: int, count: int = 1200) -> Split:
    """Return hour, weekday, price and a time stamp in seconds, and whether a visitor buys."""
    g = generator(seed)
    hour = 24 * torch.rand(count, generator=g)
    day = torch.randint(0, 7, (count,), generator=g).float()
    price = torch.randn(count, generator=g)
    stamp = 1.7e9 + 8.64e4 * 30 * torch.rand(count, generator=g)
    wants = torch.sin(hour / 24 * 2 * math.pi) - price + 0.3 * (day > 4)
    x = torch.stack([torch.sin(hour / 24 * 2 * math.pi), day / 7, price, stamp], dim=1)
    return split(x, (wants > 0).float())


@program(
    "tabular",
    "unscaled-data",
    "exploding-gradient",
    story="A time stamp in seconds, 1.7 billion, is one of four columns; the others are about 1.",
    source="Liam0205/liam0205.github.io#262",
)
def time_stamp_in_seconds(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = visits(seed)
    mean, std = data.x.mean(0), data.x.std(0)
    if faulty:
        mean, std = torch.zeros(4), torch.ones(4)
    net = mlp(4, 16, 1)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        loss=lambda batch: F.binary_cross_entropy_with_logits(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples((data.x - mean) / std, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: binary_accuracy(net, (data.x_test - mean) / std, data.y_test),
    )


@program(
    "tabular",
    "missing-zero-grad",
    "oscillation",
    story="zero_grad stands in front of the loop over the batches: it is called once an epoch of 60 steps.",
    source="pytorch/pytorch#47175",
)
def cleared_once_an_epoch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 30)
    net = mlp(8, 32, 32, 1)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=15, seed=seed),
        num_steps=420,
        score=lambda: explained(net, data.x_test, data.y_test),
        loop=LoopFaults(zero_grad_every=60 if faulty else 1),
    )


@program(
    "tabular",
    "target-leak",
    "suspicious-perfection",
    story="The table still has the column the target was made from; in use it is empty.",
    loss_tells=False,
)
def column_of_the_target(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 50)
    shown = 2 * data.y.unsqueeze(1) if faulty else torch.zeros(len(data.y), 1)
    x = torch.cat([data.x, shown], dim=1)
    x_test = torch.cat([data.x_test, torch.zeros(len(data.y_test), 1)], dim=1)
    net = mlp(9, 32, 1)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(net, x_test, data.y_test),
    )


@program(
    "tabular",
    "vanishing-gradient",
    "saturation",
    "learning-rate-too-low",
    story="Ten layers of sigmoids, as the textbook draws them, do not learn the digits.",
    source="AutoTrainer (Zhang et al., ICSE 2021): gradient vanish",
    same_start=False,
)
def ten_layers_of_sigmoids(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = mlp(64, *([40] * 9), 10, act=nn.Sigmoid if faulty else nn.ReLU)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0].flatten(1)), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=350,
        score=lambda: accuracy(net, data.x_test.flatten(1), data.y_test),
    )


@program(
    "tabular",
    "constant-targets",
    "suspicious-perfection",
    story="Ratings were rescaled to 0..1, and the threshold that makes them labels is still 5.",
    loss_tells=False,
)
def threshold_of_another_scale(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 40)
    rating, rating_test = torch.sigmoid(data.y), torch.sigmoid(data.y_test)
    labels = (rating > (5.0 if faulty else 0.5)).float()
    net = mlp(8, 32, 1)
    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=5e-3),
        loss=lambda batch: F.binary_cross_entropy(torch.sigmoid(net(batch[0])).squeeze(1), batch[1]),
        batches=tuples(data.x, labels, size=32, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(net, data.x_test, (rating_test > 0.5).float()),
    )


def _halves(x: Tensor, y: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in tuples(x, y, size=32, seed=seed)():
        yield a.half(), b


@program(
    "tabular",
    "precision",
    "non-finite",
    story="Model and Adam are in float16, where the epsilon of 1e-8 is zero: the first step divides by zero.",
    source="afiaka87/glide-finetune#5",
)
def epsilon_in_half_precision(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = mlp(64, 32, 10).half()
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3, eps=1e-8 if faulty else 1e-4, foreach=False),
        loss=lambda batch: F.cross_entropy(net(batch[0].flatten(1)).float(), batch[1]),
        batches=lambda: _halves(data.x, data.y, seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test.flatten(1).half(), data.y_test),
    )


TABULAR = (
    every_row_with_every_other,
    all_weights_at_zero,
    adadelta_from_keras,
    prices_as_they_are,
    summed_at_the_rate_of_the_mean,
    time_stamp_in_seconds,
    cleared_once_an_epoch,
    column_of_the_target,
    ten_layers_of_sigmoids,
    threshold_of_another_scale,
    epsilon_in_half_precision,
)
