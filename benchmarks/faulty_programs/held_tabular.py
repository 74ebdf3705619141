"""Held programs on tables, sets, mixtures, and times of survival."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import Split, digits, friedman, generator, split, table
from .program import LoopFaults, Setup, program
from .shared import accuracy, binary_accuracy, evaluating, explained, mlp, tuples


def _patients(seed: int, count: int = 1000) -> Split:
    """Return six columns, and (time, event) as targets; a third is censored."""
    g = generator(seed)
    x = torch.randn(count, 6, generator=g)
    hazard = torch.exp(1.2 * x[:, 0] - x[:, 1] + 0.8 * x[:, 2] * x[:, 3])
    dies = -torch.rand(count, generator=g).log() / hazard
    leaves = -torch.rand(count, generator=g).log() / 0.4
    return split(x, torch.stack([torch.minimum(dies, leaves), (dies < leaves).float()], dim=1))


def concordance(risk: Tensor, time: Tensor, event: Tensor) -> float:
    """Return the share of comparable pairs in which the one with more risk dies first."""
    first = (time.unsqueeze(1) < time.unsqueeze(0)) & (event.unsqueeze(1) > 0)
    right = risk.unsqueeze(1) > risk.unsqueeze(0)
    return float((first & right).sum() / first.sum())


class _CoxLoss(nn.Module):
    """The negative partial log likelihood; the rows come with the longest time first."""

    def forward(self, risk: Tensor, event: Tensor) -> Tensor:
        return ((risk.logcumsumexp(0) - risk) * event).sum() / event.sum().clamp(min=1)


def _survival(seed: int, size: int, prepare: Callable[[Tensor], Tensor]) -> Setup:
    data = _patients(seed)
    net, criterion = mlp(6, 24, 1, act=nn.SELU), _CoxLoss()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        order = prepare(batch[1][:, 0])
        return criterion(net(batch[0][order]).squeeze(1), batch[1][order, 1])  # type: ignore[no-any-return]

    def score() -> float:
        with evaluating(net):
            return concordance(net(data.x_test).squeeze(1), *data.y_test.unbind(1))

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=size, seed=seed),
        num_steps=250,
        score=score,
    )


@program(
    "survival",
    "wrong-loss",
    "labels-shuffled",
    story="Cox's partial likelihood needs the rows from the longest time to the shortest; they come the other way.",
    source="https://github.com/UK-Digital-Heart-Project/4Dsurvival/pull/13",
    loss_tells=False,
)
def shortest_time_first(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    return _survival(seed, 64, lambda time: time.argsort(descending=not faulty))


@program(
    "survival",
    "batch-size-unfit",
    "zero-gradient",
    story="Scans are large, so the batch is one patient: the partial likelihood compares it with itself and is zero.",
    source="https://github.com/Novartis/torchsurv/issues/35",
    loss_tells=False,
)
def one_patient_at_a_time(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    return _survival(seed + 5, 1 if faulty else 48, lambda time: time.argsort(descending=True))


class _DeepSet(nn.Module):
    """Encode every element, take the mean, decode; the layers are bare matrices."""

    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__()
        sizes = [(2, width), (width, width), (width, width), (width, 1)]
        self.weights = nn.ParameterList(torch.randn(a, b) * (math.sqrt(2 / a) if scaled else 1.0) for a, b in sizes)
        self.biases = nn.ParameterList(torch.zeros(b) for _, b in sizes)

    def forward(self, points: Tensor) -> Tensor:
        x = points
        for level, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ w + b
            x = x.mean(1) if level == 1 else x
            x = F.relu(x) if level < 3 else x
        return x.squeeze(-1)


def _clouds(seed: int, count: int = 800) -> Split:
    g = generator(seed)
    spread = 0.3 + torch.rand(count, 1, 1, generator=g)
    points = spread * torch.randn(count, 12, 2, generator=g) + 0.3 * torch.randn(count, 1, 2, generator=g)
    target = points.norm(dim=2).mean(1)
    return split(points, (target - target.mean()) / target.std())


@program(
    "sets",
    "poor-initialisation",
    "exploding-gradient",
    story="The matrices of a network over sets are torch.randn as they come: the first outputs are in the hundreds.",
    same_start=False,
)
def matrices_of_randn(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = _clouds(seed)
    net = _DeepSet(128, scaled=not faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-4),
        loss=lambda batch: F.mse_loss(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


class Mixture(nn.Module):
    """A gate that mixes experts."""

    def __init__(self, inputs: int, outputs: int, temperature: float, *, registered: bool = True) -> None:
        super().__init__()
        experts = [mlp(inputs, 8, outputs, act=nn.Tanh) for _ in range(4)]
        self.experts = nn.ModuleList(experts) if registered else experts
        self.gate = nn.Linear(inputs, 4)
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        """Return what the experts say, weighed by the gate."""
        weights = (self.gate(x) / self.temperature).softmax(1)
        return torch.einsum("ne,neo->no", weights, torch.stack([expert(x) for expert in self.experts], dim=1))


@program(
    "mixture",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="The experts are in a plain list: the optimizer gets the gate alone and mixes experts that never learn.",
    source="https://github.com/pytorch/pytorch/issues/666",
    same_start=False,
)
def experts_in_a_list(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = Mixture(64, 10, 1.0, registered=not faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(net(batch[0].flatten(1)), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, data.x_test.flatten(1), data.y_test),
    )


@program(
    "tabular",
    "missing-zero-grad",
    "oscillation",
    "learning-rate-too-high",
    story="A lecture's network of bare tensors is moved to SGD with momentum, and the line that clears .grad is lost.",
)
def lecture_without_clearing(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed)
    p = nn.ParameterDict(
        {"w1": torch.randn(8, 32) / 3, "b1": torch.zeros(32), "w2": torch.randn(32, 1) / 6, "b2": torch.zeros(1)}
    )

    def forward(x: Tensor) -> Tensor:
        return ((x @ p["w1"] + p["b1"]).tanh() @ p["w2"] + p["b2"]).squeeze(1)  # type: ignore[no-any-return]

    def score() -> float:
        with torch.no_grad():
            error = (forward(data.x_test) - data.y_test).pow(2).mean() / data.y_test.var()
        return max(-1.0, 1 - float(error))

    return Setup(
        model=p,
        optimizer=torch.optim.SGD(p.parameters(), lr=0.03, momentum=0.5),
        loss=lambda batch: (forward(batch[0]) - batch[1]).square().mean(),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=score,
        loop=LoopFaults(zero_grad_every=0 if faulty else 1),
    )


@program(
    "tabular",
    "constant-targets",
    "suspicious-perfection",
    story="A notebook compares the integer diagnosis with the string '1': every label is 0.",
    loss_tells=False,
)
def compared_with_a_string(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("breast_cancer")
    rows: list[object] = data.y.tolist()
    wanted: object = "1" if faulty else 1
    labels = torch.tensor([float(row == wanted) for row in rows])
    model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    criterion = nn.BCEWithLogitsLoss()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=lambda batch: criterion(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, labels, size=32, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


TABULAR = (
    shortest_time_first,
    one_patient_at_a_time,
    matrices_of_randn,
    experts_in_a_list,
    lecture_without_clearing,
    compared_with_a_string,
)
