"""Fresh programs on tables: regression, classification, learning to learn."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from .data import friedman, generator, table
from .fresh_data import spirals
from .program import LoopFaults, Setup, program
from .shared import accuracy, explained, mlp, tuples


def _tasks(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points and values of sine waves of random size and phase, 20 per task; the first ten are for adapting."""
    size, phase = torch.rand(count, 1, generator=g) * 2 + 0.5, torch.rand(count, 1, generator=g) * math.pi
    x = torch.rand(count, 20, generator=g) * 6 - 3
    return x.unsqueeze(-1), (size * torch.sin(x + phase)).unsqueeze(-1)


@program(
    "metalearning",
    "learning-rate-too-high",
    "exploding-gradient",
    story="The inner step of each task uses a rate of 2 instead of 0.02: adapting overshoots.",
)
def inner_step_too_long(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = mlp(1, 32, 32, 1, act=nn.Tanh)
    rate = 2.0 if faulty else 0.02

    def adapted_error(x: Tensor, y: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(model.named_parameters())
        for _ in range(2):
            error = F.mse_loss(functional_call(model, weights, (x[:10],)), y[:10])
            slopes = torch.autograd.grad(error, list(weights.values()), create_graph=True)
            weights = {name: w - rate * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(functional_call(model, weights, (x[10:],)), y[10:])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        while True:
            yield _tasks(6, g)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.stack([adapted_error(x, y) for x, y in zip(*batch, strict=True)]).mean()

    def score() -> float:
        error = float(loss(_tasks(30, generator(1))).detach())
        return -min(error, 10.0) if math.isfinite(error) else -10.0

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=loss,
        batches=batches,
        num_steps=200,
        score=score,
    )


@program(
    "tabular",
    "optimizer-state-reset",
    "learning-rate-too-high",
    "oscillation",
    story="RMSprop is created inside the loop: its average starts at zero, and every step is ten times the rate.",
    source="tensorflow/tensorflow#29675",
)
def rmsprop_made_in_the_loop(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 40, 40, 1)
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-2),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
        loop=LoopFaults(reset_optimizer_every=1 if faulty else 0),
    )


@program(
    "tabular",
    "non-finite",
    story="torch.where guards a square root against negative numbers, but the branch not taken has a gradient of NaN.",
    source="pytorch/pytorch#68425",
)
def guarded_by_where(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 40, 1)

    def squashed(raw: Tensor) -> Tensor:
        """Return the root of the size, with the sign of `raw`, written with two branches."""
        up = raw if faulty else raw.clamp(min=0)
        down = -raw if faulty else (-raw).clamp(min=0)
        return torch.where(raw > 0, (up + 0.1).sqrt(), -(down + 0.1).sqrt())

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        loss=lambda batch: F.mse_loss(squashed(3 * model(batch[0]).squeeze(1)), squashed(3 * batch[1])),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


class _Residual(nn.Module):
    """Blocks that add to a stream without any normalization."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(2, 32), nn.Linear(32, 3)
        self.blocks = nn.ModuleList(mlp(32, 32, 32) for _ in range(16))
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        with torch.no_grad():
            for block in self.blocks.modules():
                if isinstance(block, nn.Sequential):
                    block[2].weight.mul_(gain)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.leave(x)
        return logits


@program(
    "tabular",
    "exploding-gradient",
    "poor-initialisation",
    story="Sixteen residual blocks without normalization, each with full gain: the stream grows threefold per block.",
    source="Zhang et al., Fixup initialization: residual learning without normalization (ICLR 2019)",
    same_start=False,
)
def full_gain_in_every_block(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = spirals(seed), _Residual(1.0 if faulty else 0.05)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "learning-rate-too-low",
    story="The rate of 3e-4 that works for Adam is kept after a change to plain SGD.",
)
def rate_of_adam_for_sgd(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = spirals(seed), mlp(2, 48, 48, 3)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=3e-4 if faulty else 0.3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "unscaled-data",
    story="One of thirteen columns is in thousands and is not standardized with the others.",
)
def one_column_left_out(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = table("wine"), mlp(13, 24, 3, act=nn.Tanh)
    raw = table("wine", raw=True)
    x, x_test = data.x.clone(), data.x_test.clone()
    if faulty:
        x[:, 12], x_test[:, 12] = raw.x[:, 12], raw.x_test[:, 12]
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(x, data.y, size=16, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, x_test, data.y_test),
    )


@program(
    "tabular",
    "unscaled-targets",
    story="Years of release, 1922 to 2011, are predicted as they are: the last bias has a long way to go.",
)
def years_as_they_are(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 40, 40, 1, act=nn.Tanh)
    shift, scale = (1998.0, 10.0) if faulty else (0.0, 1.0)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y * scale + shift, size=32, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, data.y_test * scale + shift),
    )


TABLES = (
    inner_step_too_long,
    rmsprop_made_in_the_loop,
    guarded_by_where,
    full_gain_in_every_block,
    rate_of_adam_for_sgd,
    one_column_left_out,
    years_as_they_are,
)
