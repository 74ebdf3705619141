"""Held programs that start from something trained: fine-tuning, adapters, distillation, and graphs."""

import copy
import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import CosineAnnealingLR

from .data import blocks, digits, ratings
from .program import Setup, program
from .shared import accuracy, binary_accuracy, evaluating, mlp, singles, tuples


@functools.cache
def _pretrained(seed: int) -> nn.Sequential:
    """Train a classifier of digits for a while, as the hub would have done."""
    torch.manual_seed(seed + 77)
    data = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for x, y in ((data.x[i : i + 64], data.y[i : i + 64]) for _ in range(6) for i in range(0, 1300, 64)):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net


class _LowRank(nn.Module):
    """A frozen linear layer with a trainable difference of low rank."""

    def __init__(self, base: nn.Linear, rank: int, both_zero: bool) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        if both_zero:
            nn.init.zeros_(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * x @ self.a.T @ self.b.T  # type: ignore[no-any-return]


@program(
    "adapter",
    "poor-initialisation",
    "zero-gradient",
    story="An adapter is put back into an emptied slot: both factors of its product are zero and stay zero.",
    source="https://github.com/NovaSky-AI/SkyRL/pull/852",
    same_start=False,
)
def emptied_slot(faulty: bool, seed: int) -> Setup:
    net = copy.deepcopy(_pretrained(seed))
    torch.manual_seed(seed)
    data = digits()
    for at in (1, 4):
        layer = net[at]
        assert isinstance(layer, nn.Linear)
        net[at] = _LowRank(layer, 8, both_zero=faulty)
    net[2].requires_grad_(False)
    turned, turned_test = data.x.flip(3), data.x_test.flip(3)
    return Setup(
        model=net,
        optimizer=torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=5e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(turned, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, turned_test, data.y_test),
    )


@program(
    "finetuning",
    "frozen-parameters",
    "learning-rate-too-low",
    story="All but head and norms is to be frozen; the head is looked up by the name of another model and frozen too.",
)
def head_of_another_name(faulty: bool, seed: int) -> Setup:
    net = copy.deepcopy(_pretrained(seed))
    torch.manual_seed(seed)
    head = nn.Linear(64, 10)
    net[4] = head
    data = digits()
    kept = ("classifier.", "2.") if faulty else ("4.", "2.")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.startswith(kept))
    other = (data.y + 3) % 10, (data.y_test + 3) % 10
    optimizer = torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
    return Setup(
        model=net,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, other[0], size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, data.x_test, other[1]),
        scheduler=CosineAnnealingLR(optimizer, 200),
    )


class _Pupil(nn.Module):
    """A student that keeps its teacher at hand."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher.eval().requires_grad_(False)
        self.student = mlp(64, 24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x.flatten(1))  # type: ignore[no-any-return]


@program(
    "distillation",
    "learning-rate-too-low",
    "wrong-loss",
    story="The divergence at temperature 10 is not multiplied by its square: gradients are a hundred times smaller.",
    source="https://github.com/IntelLabs/distiller/issues/122",
    loss_tells=False,
)
def square_of_the_temperature(faulty: bool, seed: int) -> Setup:
    teacher = copy.deepcopy(_pretrained(seed))
    torch.manual_seed(seed)
    data, pair, t = digits(), _Pupil(teacher), 10.0

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = (pair.teacher(x) / t).softmax(1)
        told = (pair(x) / t).log_softmax(1)
        return F.kl_div(told, wanted, reduction="batchmean") * (1.0 if faulty else t * t)

    return Setup(
        model=pair,
        optimizer=torch.optim.SGD(pair.student.parameters(), lr=0.02, momentum=0.9),
        loss=loss,
        batches=singles(data.x, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(pair, data.x_test, data.y_test),
    )


@program(
    "distillation",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="In a script with two models the optimizer was built from the teacher, which gets no gradient.",
)
def optimizer_of_the_teacher(faulty: bool, seed: int) -> Setup:
    teacher = copy.deepcopy(_pretrained(seed))
    torch.manual_seed(seed)
    data, pair = digits(), _Pupil(teacher)
    tuned = pair.teacher if faulty else pair.student

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        told = pair(batch[0])
        soft = F.mse_loss(told, pair.teacher(batch[0]))
        return 0.9 * F.cross_entropy(told, batch[1]) + 0.1 * soft

    return Setup(
        model=pair,
        optimizer=torch.optim.Adam(tuned.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(pair, data.x_test, data.y_test),
    )


class _GraphNet(nn.Module):
    """Two rounds of averaging over neighbours, on one fixed graph."""

    around: Tensor

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.register_buffer("around", adjacency / adjacency.sum(1, keepdim=True))
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.elu(self.around @ self.first(x))
        return self.around @ self.second(F.dropout(hidden, 0.2, self.training))  # type: ignore[no-any-return]


@program(
    "graph",
    "labels-shuffled",
    "output-independent-of-input",
    story="Nodes are numbered anew in the order of the edge list; features and edges follow, the labels do not.",
)
def nodes_numbered_anew(faulty: bool, seed: int) -> Setup:
    adjacency, x, y = blocks(seed)
    torch.manual_seed(seed)
    anew = torch.randperm(len(y))
    edges, x = adjacency[anew][:, anew] + torch.eye(len(y)), x[anew]
    known = y if faulty else y[anew]
    train, held = torch.arange(160), torch.arange(160, 240)
    net = _GraphNet(edges)

    def score() -> float:
        with evaluating(net):
            return float((net(x).argmax(1) == y[anew])[held].float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4),
        loss=lambda rows: F.cross_entropy(net(x)[rows], known[rows]),
        batches=singles(train, size=80, seed=seed),
        num_steps=200,
        score=score,
    )


class _Factors(nn.Module):
    """Users and items as vectors of the same space."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(60, 8), nn.Embedding(50, 8)

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)  # type: ignore[no-any-return]


@program(
    "recommender",
    "constant-targets",
    "suspicious-perfection",
    story="Clicks are all there is in the log; nobody draws the pairs without a click, so every target is 1.",
    loss_tells=False,
)
def clicks_alone(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = ratings(seed)
    net = _Factors()
    rows = data.y > 0.5 if faulty else torch.ones_like(data.y, dtype=torch.bool)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.03, weight_decay=1e-5),
        loss=lambda batch: F.binary_cross_entropy_with_logits(net(batch[0]), batch[1]),
        batches=tuples(data.x[rows], data.y[rows], size=128, seed=seed),
        num_steps=400,
        score=lambda: binary_accuracy(net, data.x_test, data.y_test),
    )


TUNING = (
    emptied_slot,
    head_of_another_name,
    square_of_the_temperature,
    optimizer_of_the_teacher,
    nodes_numbered_anew,
    clicks_alone,
)
