"""Spare programs on pairs and places: margins, views, neighbours, and places in pictures."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import Split, blocks, digits, discs, generator, split
from .program import Setup, program
from .shared import evaluating, explained, mlp, tuples


class _Margin(nn.Module):
    """ArcFace: the angle to the own center has to be smaller by a margin. The centers belong to the loss."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.centers = nn.Parameter(1 + 0.16 * torch.randn(classes, width))

    def cosines(self, x: Tensor) -> Tensor:
        """Return the cosine of each row with each center."""
        return F.normalize(x, dim=1) @ F.normalize(self.centers, dim=1).T

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        angle = self.cosines(x).clamp(-0.999, 0.999).acos()
        return F.cross_entropy(10 * (angle + 0.05 * F.one_hot(y, len(self.centers))).cos(), y)


@program(
    "metric",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="The centers of the classes are parameters of the loss, and only the network's parameters are optimized.",
    source="https://github.com/TreB1eN/InsightFace_Pytorch/issues/71",
)
def centers_belong_to_the_loss(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net, margin = digits(), mlp(64, 64, 5), _Margin(5, 10)
    model = nn.ModuleDict({"net": net, "margin": margin})

    def score() -> float:
        with evaluating(model):
            return float((margin.cosines(net(data.x_test.flatten(1))).argmax(1) == data.y_test).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(net.parameters() if faulty else model.parameters(), lr=3e-3),
        loss=lambda batch: margin(net(batch[0].flatten(1)), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=score,
    )


def _scenes(seed: int, count: int = 900) -> Split:
    """Return 24 columns: where a camera stood, loud and of no interest, and what it saw, faint; and what that was."""
    g = generator(seed)
    y = torch.randint(0, 4, (count,), generator=g)
    thing = 1.2 * F.one_hot(y, 8).float() + 0.25 * torch.randn(count, 8, generator=g)
    return split(torch.cat([2 * torch.randn(count, 16, generator=g), thing], dim=1), y)


@program(
    "contrastive",
    "suspicious-perfection",
    "target-leak",
    "wrong-loss",
    story="The transform is called once and its picture used as both views: they are equal, and the loss vanishes.",
    loss_tells=False,
)
def the_same_view_twice(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = _scenes(seed), mlp(24, 64, 8)

    def views() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        while True:
            x = data.x[torch.randint(0, len(data.x), (64,), generator=g)]
            pair = []
            for _ in range(2):
                camera = 2 * torch.randn(64, 16, generator=g)
                pair.append(torch.cat([camera, x[:, 16:] + 0.1 * torch.randn(64, 8, generator=g)], dim=1))
            yield pair[0], pair[0] if faulty else pair[1]

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (F.normalize(net(view), dim=1) for view in batch)
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    def score() -> float:
        with evaluating(net):
            known, asked = (F.normalize(net(x), dim=1) for x in (data.x, data.x_test))
        near = (asked @ known.T).topk(5, dim=1).indices
        return float((data.y[near].mode(1).values == data.y_test).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=3e-3),
        loss=loss,
        batches=views,
        num_steps=300,
        score=score,
    )


@program(
    "graph",
    "non-finite",
    story="Neighbourhoods are sampled, and nodes left without an edge are divided by the root of a degree of zero.",
)
def lonely_nodes(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    edges, x, y = blocks(seed)
    first, second = nn.Linear(8, 32), nn.Linear(32, 3)
    net = nn.ModuleList([first, second])

    def forward(a: Tensor, x: Tensor) -> Tensor:
        degree = a.sum(1) if faulty else a.sum(1).clamp(min=1)
        a = a * degree.rsqrt().unsqueeze(0) * degree.rsqrt().unsqueeze(1)
        own = first(x)
        return second((own + a @ own).relu())  # type: ignore[no-any-return]

    def samples() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        g = generator(seed)
        while True:
            rows = torch.randperm(180, generator=g)[:120]
            yield edges[rows][:, rows], x[rows], y[rows]

    def score() -> float:
        with torch.no_grad():
            return float((forward(edges, x)[180:].argmax(1) == y[180:]).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adagrad(net.parameters(), lr=0.1, weight_decay=1e-3),
        loss=lambda batch: F.cross_entropy(forward(batch[0], batch[1]), batch[2]),
        batches=samples,
        num_steps=150,
        score=score,
    )


class _Finder(nn.Module):
    """A heat map that becomes a place, by the softmax of it or by its largest number; and a brightness."""

    def __init__(self, soft: bool) -> None:
        super().__init__()
        self.soft = soft
        self.body = nn.Sequential(nn.Conv2d(1, 12, 5, padding=2), nn.ReLU())
        self.heat, self.bright = nn.Conv2d(12, 1, 5, padding=2), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.body(x)
        heat = self.heat(seen).flatten(1)
        weights = heat.softmax(1) if self.soft else F.one_hot(heat.argmax(1), heat.shape[1]).float()
        axis = torch.linspace(-1, 1, 16)
        return weights @ torch.cartesian_prod(axis, axis), self.bright(seen.amax((2, 3))).squeeze(1)


@program(
    "keypoints",
    "zero-gradient",
    "wrong-loss",
    story="The place of a disc is the argmax of a heat map: nothing tells the map where the disc is.",
)
def place_by_argmax(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = discs(seed), _Finder(soft=not faulty)
    axis = torch.linspace(-1, 1, 16)

    def center(mask: Tensor) -> Tensor:
        share = mask.flatten(1) / mask.sum((1, 2, 3)).unsqueeze(1)
        return share @ torch.cartesian_prod(axis, axis)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        place, bright = net(batch[0])
        return 4 * F.mse_loss(place, center(batch[1])) + 0.3 * F.mse_loss(bright, batch[0].amax((1, 2, 3)))

    def score() -> float:
        with evaluating(net):
            error = (net(data.x_test)[0] - center(data.y_test)).norm(dim=1).mean()
        return 1 - float(error) / math.sqrt(2)

    return Setup(
        model=net,
        optimizer=torch.optim.NAdam(net.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=score,
    )


@program(
    "keypoints",
    "labels-shuffled",
    story="Pictures are listed in the order of their names as text, where 10 comes before 2; their places as numbered.",
    source="https://github.com/deepchem/deepchem/pull/3695",
)
def ten_comes_before_two(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, axis = discs(seed + 6, 700), torch.linspace(-1, 1, 16)
    names = [f"picture_{number}.png" for number in range(len(data.x))]
    listed = sorted(names) if faulty else sorted(names, key=lambda name: int(name[8:-4]))
    pictures = data.x[torch.tensor([names.index(name) for name in listed])]
    net = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 2),
    )  # fmt: skip

    def center(mask: Tensor) -> Tensor:
        return mask.flatten(1) / mask.sum((1, 2, 3)).unsqueeze(1) @ torch.cartesian_prod(axis, axis)

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        loss=lambda batch: F.smooth_l1_loss(net(batch[0]), batch[1], beta=0.1),
        batches=tuples(pictures, center(data.y), size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, center(data.y_test)),
    )


PAIRS = (
    ten_comes_before_two,
    centers_belong_to_the_loss,
    the_same_view_twice,
    lonely_nodes,
    place_by_argmax,
)
