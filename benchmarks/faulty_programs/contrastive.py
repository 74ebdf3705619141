"""Representations of digits learned from two noisy views, or from triplets; scored by the nearest class mean."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, generator
from .program import Setup, program
from .shared import evaluating, indices, mlp, tuples


def nearest_mean(model: nn.Module, moved: int = 1) -> float:
    """Return how often a held-out digit, moved by some pixels, is closest to the mean of its own class in place."""
    data = digits()
    with evaluating(model):
        known, asked = model(data.x[:400].flatten(1)), model(data.x_test.roll((moved, moved), (2, 3)).flatten(1))
    centers = torch.stack([known[data.y[:400] == digit].mean(0) for digit in range(10)])
    return float((torch.cdist(asked, centers).argmin(1) == data.y_test).float().mean())


def views(seed: int, size: int = 64, *, unpaired: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two noisy copies of the same digits, shifted by a pixel at random."""
    g, x = generator(seed), digits().x
    for rows in indices(len(x), size, seed):
        pair = []
        for _ in range(2):
            shift = [int(torch.randint(-1, 2, (1,), generator=g)) for _ in range(2)]
            moved = x[rows].roll(shift, (2, 3)).flatten(1)
            pair.append(moved + 0.1 * torch.randn(moved.shape, generator=g))
        order = torch.randperm(size, generator=g)
        yield pair[0], pair[1][order] if unpaired else pair[1]


def info_nce(first: Tensor, second: Tensor, temperature: float = 0.2) -> Tensor:
    """Return the cross-entropy of finding the other view of each example in the batch."""
    alike = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T / temperature
    return F.cross_entropy(alike, torch.arange(len(alike)))


@program(
    "contrastive",
    "labels-shuffled",
    story="The two views come from two loaders that shuffle on their own, so the pairs do not belong together.",
)
def views_of_others(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = mlp(64, 64, 16)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: info_nce(model(batch[0]), model(batch[1])),
        batches=lambda: views(seed, unpaired=faulty),
        num_steps=450,
        score=lambda: nearest_mean(model),
    )


class _Triplets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(64, 48, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=1)

    def loss(self, x: Tensor, y: Tensor, floor: float) -> Tensor:
        """Average the hinge over the triplets that violate the margin."""
        points = self(x)
        far = (points.unsqueeze(1) - points.unsqueeze(0)).pow(2).sum(-1)
        same = y.unsqueeze(1) == y.unsqueeze(0)
        hinge = torch.relu(far.unsqueeze(2) - far.unsqueeze(1) + 0.1) * (same.unsqueeze(2) & ~same.unsqueeze(1))
        return hinge.sum() / (hinge > 0).sum().clamp(min=floor)


@program(
    "contrastive",
    "non-finite",
    story="The hinge is averaged over the triplets that violate the margin; once none does, it is 0 / 0.",
    source="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/107",
)
def mean_of_no_triplets(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _Triplets()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: model.loss(batch[0], batch[1], 0 if faulty else 1),
        batches=tuples(data.x.flatten(1), data.y, size=12, seed=seed),
        num_steps=250,
        score=lambda: nearest_mean(model, moved=0),
    )


@program(
    "contrastive",
    "output-independent-of-input",
    story="Two views are pulled together and nothing pushes others apart: every input gets the same representation.",
    source="Chen and He, Exploring simple Siamese representation learning, 2021",
    loss_tells=False,
)
def pulled_together_only(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = mlp(64, 64, 16, act=nn.GELU)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        first, second = model(batch[0]), model(batch[1])
        return 1 - F.cosine_similarity(first, second).mean() if faulty else info_nce(first, second)

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01),
        loss=loss,
        batches=lambda: views(seed),
        num_steps=450,
        score=lambda: nearest_mean(model),
    )


CONTRASTIVE = (views_of_others, mean_of_no_triplets, pulled_together_only)
