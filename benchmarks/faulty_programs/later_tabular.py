"""Later programs on tables, most in the style of a beginner's question."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import Split, digits, generator, split, table
from .program import Setup, program
from .shared import accuracy, binary_accuracy, evaluating, explained, tuples


def quadrants(seed: int, count: int = 1200) -> Split:
    """Return points of the plane and whether their coordinates have the same sign: XOR with room between."""
    g = generator(seed)
    x = torch.rand(count, 2, generator=g) * 2 - 1
    return split(x, (x[:, 0] * x[:, 1] > 0).float())


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x1 = nn.Linear(2, 8)
        self.s1 = nn.Sigmoid()
        self.x2 = nn.Linear(8, 1)
        self.s2 = nn.Sigmoid()

    def forward(self, feats: Tensor) -> Tensor:
        out: Tensor = self.s2(self.x2(self.s1(self.x1(feats))))
        return out


@program(
    "tabular",
    "learning-rate-too-low",
    "vanishing-gradient",
    "saturation",
    story="A network of sigmoids learns XOR with SGD at 0.01: the weights change, and every answer stays at 0.5.",
    source="https://discuss.pytorch.org/t/simple-linear-sigmoid-network-not-learning/98714",
)
def gate_at_one_hundredth(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = quadrants(seed), _Gate()
    criterion = nn.MSELoss()

    def score() -> float:
        with evaluating(net):
            return float(((net(data.x_test).flatten() > 0.5) == (data.y_test > 0.5)).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01 if faulty else 5.0, momentum=0.9),
        loss=lambda batch: criterion(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=600,
        score=score,
    )


@program(
    "tabular",
    "wrong-loss",
    story="The number of the class is predicted as a value with MSELoss and rounded.",
    same_start=False,
    loss_tells=False,
)
def class_number_as_a_value(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1 if faulty else 10))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        if faulty:
            return F.mse_loss(net(batch[0]).squeeze(1), batch[1].float())
        return F.cross_entropy(net(batch[0]), batch[1])

    def score() -> float:
        with evaluating(net):
            out = net(data.x_test)
        guess = out.squeeze(1).round() if faulty else out.argmax(1)
        return float((guess == data.y_test).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=score,
    )


class _Model(nn.Module):
    def __init__(self, input_size: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, hidden)
        self.linear2 = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear2(torch.sigmoid(self.linear(x)))
        return out


@program(
    "tabular",
    "unscaled-data",
    "saturation",
    story="Columns with means from 0.1 to 900 go into a layer of sigmoids as they are.",
    source="https://openillumi.com/en/en-pytorch-performance-fix-standardization",
)
def heart_rates_as_they_are(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("breast_cancer", raw=faulty)
    net = _Model(30, 16)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=lambda batch: F.binary_cross_entropy_with_logits(net(batch[0]).squeeze(1), batch[1].float()),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=300,
        score=lambda: binary_accuracy(net, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "constant-targets",
    "suspicious-perfection",
    story="The labels are scaled together with the columns and then cast to integers: all of them become 0.",
    loss_tells=False,
)
def labels_cut_to_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("wine")
    net = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3))
    labels = (data.y / 3).long() if faulty else data.y
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, labels, size=16, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "vanishing-gradient",
    "poor-initialisation",
    "output-independent-of-input",
    "dead-units",
    story="Eight narrow layers of ReLU with small first weights: the output is the same for every input.",
    source="pytorch/pytorch#63626",
    same_start=False,
)
def deep_and_narrow(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed)
    x = torch.randn(2000, 2, generator=g)
    data = split(x, torch.sin(x[:, 0] * x[:, 1]))
    layers: list[nn.Module] = [nn.Linear(2, 10), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Linear(10, 10), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(10, 1))
    if not faulty:
        for module in model:
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2))
                nn.init.zeros_(module.bias)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.l1_loss(model(batch[0]), batch[1].unsqueeze(1)),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=500,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "regularisation-too-strong",
    "output-independent-of-input",
    story="A weight decay of 0.5 pulls every weight to zero, and all inputs get the same answer.",
    source="BVLC/caffe#1396",
)
def weight_decay_of_one_half(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("wine")
    net = nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.5 if faulty else 5e-4),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "unshuffled-data",
    story="The table is sorted by class and read from top to bottom.",
    loss_tells=False,
)
def table_sorted_by_class(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    order = data.y.argsort() if faulty else torch.arange(len(data.y))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x[order], data.y[order], size=32, seed=seed, shuffle=not faulty),
        num_steps=294,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "non-finite",
    "exploding-gradient",
    story="A cross-entropy written by hand takes log(p) and log(1 - p) without an epsilon.",
    source="NVIDIA/apex#358",
)
def logarithm_without_epsilon(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("breast_cancer")
    net = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 1))
    eps = 0.0 if faulty else 1e-6

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        p, y = torch.sigmoid(net(batch[0]).squeeze(1)), batch[1].float()
        return -(y * torch.log(p + eps) + (1 - y) * torch.log(1 - p + eps)).mean()

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: binary_accuracy(net, data.x_test, data.y_test),
    )


TABULAR = (
    gate_at_one_hundredth,
    class_number_as_a_value,
    heart_rates_as_they_are,
    labels_cut_to_zero,
    deep_and_narrow,
    weight_decay_of_one_half,
    table_sorted_by_class,
    logarithm_without_epsilon,
)
