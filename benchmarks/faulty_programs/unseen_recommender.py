"""Unseen programs that learn who likes what: factors of a rating matrix, rankings and a network on pairs."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .program import LoopFaults, Setup, program
from .shared import explained, mlp, tuples
from .unseen_data import stars


class _Factors(nn.Module):
    """Product of factors, plus a bias for the user and for the item."""

    def __init__(self, *, std: float = 0.3, top: float | None = None) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 6), nn.Embedding(40, 6)
        self.level = nn.Parameter(torch.zeros(()))
        nn.init.normal_(self.users.weight, std=std)
        nn.init.normal_(self.items.weight, std=std)
        self.top = top

    def forward(self, pairs: Tensor) -> Tensor:
        out: Tensor = (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1) + self.level
        return out.sigmoid() * self.top if self.top else out


@program(
    "recommender",
    "unscaled-targets",
    "wrong-loss",
    "saturation",
    story="Ratings from 1 to 5 are learned by a sigmoid between 0 and 1.",
    source="NeuraLint (Nikanjam et al., TOSEM 2021), last activation does not match the targets",
)
def five_stars_from_a_sigmoid(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = stars(seed), _Factors(top=1.0 if faulty else 6.0)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.03),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=128, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "recommender",
    "poor-initialisation",
    "zero-gradient",
    story="Factors of users and of items all start at zero, where the gradient of their product is zero as well.",
    same_start=False,
)
def factors_start_at_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = stars(seed), _Factors(std=0.0 if faulty else 0.3)
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=0.02),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1] - 3),
        batches=tuples(data.x, data.y, size=128, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test - 3),
    )


@program(
    "recommender",
    "missing-zero-grad",
    "learning-rate-too-high",
    "oscillation",
    story="zero_grad is called once per epoch, after 30 batches.",
    source="https://github.com/pytorch/pytorch/issues/47175",
)
def zeroed_once_per_epoch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = stars(seed), _Factors()
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.8),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1] - 3),
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, data.y_test - 3),
        loop=LoopFaults(zero_grad_every=30 if faulty else 1),
    )


class _PairNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 8), nn.Embedding(40, 8)
        self.net = mlp(16, 32, 32, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([self.users(pairs[:, 0]), self.items(pairs[:, 1])], dim=1)).squeeze(1)
        return out


@program(
    "recommender",
    "poor-initialisation",
    story="All layers start from the same constant, so that all units of a layer stay alike.",
    source="Humbatova et al., Taxonomy of real faults in deep learning systems (ICSE 2020), weights initialization",
    same_start=False,
)
def all_units_alike(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = stars(seed), _PairNet()
    if faulty:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1] - 3),
        batches=tuples(data.x, data.y, size=96, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, data.y_test - 3),
    )


RECOMMENDER = (
    five_stars_from_a_sigmoid,
    factors_start_at_zero,
    zeroed_once_per_epoch,
    all_units_alike,
)
