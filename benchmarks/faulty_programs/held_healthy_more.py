"""More held healthy oddities, with two objectives or an unusual loop."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from .data import digits, friedman, generator, ring
from .program import Setup, program
from .shared import evaluating, explained, indices, mlp, tuples


@program(
    "regression", story="Even steps fit the sum of the targets, odd steps their product: the loss jumps at every step."
)
def taking_turns(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    g = generator(seed)
    x = torch.randn(1000, 4, generator=g)
    first, second = x[:, 0] + 0.5 * x[:, 1].sin(), 4 * x[:, 2] * x[:, 3]
    net = mlp(4, 48, 2, act=torch.nn.SiLU)

    def turns() -> Iterator[tuple[Tensor, Tensor, int]]:
        for step, rows in enumerate(indices(800, 32, seed)):
            yield x[rows], (first, second)[step % 2][rows], step % 2

    def score() -> float:
        with evaluating(net):
            told = net(x[800:])
        wanted = torch.stack([first, second], dim=1)[800:]
        return 1 - float(((told - wanted).square().mean(0) / wanted.var(0)).mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(net(batch[0])[:, batch[2]], batch[1]),
        batches=turns,
        num_steps=400,
        score=score,
    )


@program(
    "flow", story="The loss of a density is a negative logarithm: it goes through zero and below.", loss_tells=False
)
def below_zero(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    g = generator(seed)
    narrow = 0.02 * torch.randn(1500, 2, generator=g) * torch.tensor([1.0, 3.0]) + torch.tensor([0.3, -0.2])
    net = torch.nn.ParameterDict({"mean": torch.zeros(2), "log_scale": torch.zeros(2)})

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        scaled = (batch[0] - net["mean"]) * (-net["log_scale"]).exp()
        return (0.5 * scaled.square() + net["log_scale"] + 0.5 * math.log(2 * math.pi)).sum(1).mean()  # type: ignore[no-any-return]

    def score() -> float:
        with torch.no_grad():
            return -float(loss((narrow[1200:],)))

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.03),
        loss=loss,
        batches=tuples(narrow[:1200], size=64, seed=seed),
        num_steps=300,
        score=score,
    )


@program("tabular", story="The rate starts over every sixty steps, and each time the loss rises for a while.")
def rate_starts_over(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data = friedman(seed + 70)
    net = mlp(8, 40, 40, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return Setup(
        model=net,
        optimizer=optimizer,
        loss=lambda batch: F.smooth_l1_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, data.y_test),
        scheduler=CosineAnnealingWarmRestarts(optimizer, 60),
    )


@program("contrastive", story="Only pairs nearer than a margin cost anything: most losses of a batch are exactly zero.")
def most_pairs_cost_nothing(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data = digits()
    net = mlp(64, 48, 6)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        code = F.normalize(net(batch[0].flatten(1)), dim=1)
        near = code @ code.T
        same = (batch[1].unsqueeze(0) == batch[1].unsqueeze(1)).float()
        return (same * (0.95 - near).relu() + (1 - same) * (near - 0.6).relu()).mean()

    def score() -> float:
        with evaluating(net):
            seen, asked = (F.normalize(net(t.flatten(1)), dim=1) for t in (data.x, data.x_test))
        centers = torch.stack([seen[data.y == k].mean(0) for k in range(10)])
        return float(((asked @ centers.T).argmax(1) == data.y_test).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=250,
        score=score,
    )


@program("diffusion", story="Noise at all times is asked for: the loss stays far from zero, and the model is good.")
def noise_that_nobody_knows(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    points = ring(seed)
    net = mlp(3, 64, 64, 2, act=torch.nn.SiLU)

    def told(noise: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return net(torch.cat([(1 - t) * x + t * noise, t], dim=1))  # type: ignore[no-any-return]

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        x, noise, t = batch[0], torch.randn_like(batch[0]), torch.rand(len(batch[0]), 1)
        return F.mse_loss(told(noise, x, t), noise - x)

    def score() -> float:
        g = generator(7)
        x, noise, t = points[1500:], torch.randn(548, 2, generator=g), torch.rand(548, 1, generator=g)
        with evaluating(net):
            return -float(F.mse_loss(told(noise, x, t), noise - x))

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3),
        loss=loss,
        batches=tuples(points[:1500], size=128, seed=seed),
        num_steps=250,
        score=score,
    )


HEALTHY_MORE = (
    taking_turns,
    below_zero,
    rate_starts_over,
    most_pairs_cost_nothing,
    noise_that_nobody_knows,
)
