"""Next healthy oddities: programs that look strange and learn."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR

from .data import digits, friedman, generator, names, series, table, waves
from .program import LoopFaults, Setup, program
from .shared import accuracy, binary_accuracy, explained, mlp, singles, tuples


@program("tabular", story="Plain SGD on a summed loss, with a learning rate of 0.0003 to make up for it.")
def summed_and_slow_on_purpose(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = friedman(seed + 60), mlp(8, 32, 1, act=nn.Tanh)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=3e-4, momentum=0.9),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1], reduction="sum"),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=400,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


@program("vision", story="Gradients of four batches are added up before they are cleared, with a rate made for that.")
def four_batches_for_one_clear(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
        loop=LoopFaults(zero_grad_every=4),
    )


@program("vision", story="A logistic regression starts with all weights at zero, as it may.")
def linear_from_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = nn.Linear(64, 10)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=lambda batch: F.cross_entropy(net(batch[0].flatten(1)), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test.flatten(1), data.y_test),
    )


@program("finetuning", story="Random features stay frozen on purpose, and only a wide linear head is trained.")
def random_features_stay(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10))
    net[1].requires_grad_(False)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=3e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program("vision", story="Cosine annealing restarts every 40 steps, and the loss jumps a little each time.")
def warm_restarts(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    return Setup(
        model=net,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=320,
        score=lambda: accuracy(net, data.x_test, data.y_test),
        scheduler=CosineAnnealingWarmRestarts(optimizer, T_0=40),
    )


@program("text", story="The labels are noisy: a fifth of them is wrong, and the loss stays high while the score rises.")
def a_fifth_of_the_labels_wrong(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = names(5)
    g = generator(seed)
    wrong = torch.rand(len(data.y), generator=g) < 0.2
    labels = torch.where(wrong, torch.randint(0, 3, data.y.shape, generator=g), data.y)
    net = nn.Sequential(nn.Embedding(27, 12), nn.Flatten(), nn.Linear(120, 16), nn.ReLU(), nn.Linear(16, 3))
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, labels, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program("tabular", story="Nine of ten rows are of one class, and class weights in the loss make up for it.")
def rare_class_weighted(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 70)
    y, y_test = (data.y > 1.1).float(), (data.y_test > 1.1).float()
    net = mlp(8, 24, 1)
    heavy = torch.tensor(8.0)

    def score() -> float:
        rows = y_test > 0.5
        found = binary_accuracy(net, data.x_test[rows], y_test[rows])
        return found + binary_accuracy(net, data.x_test[~rows], y_test[~rows])

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.binary_cross_entropy_with_logits(net(batch[0]).squeeze(1), batch[1], pos_weight=heavy),
        batches=tuples(data.x, y, size=64, seed=seed),
        num_steps=350,
        score=score,
    )


@program("tabular", story="A GELU network is trained by Rprop on the whole training set in every step.")
def whole_set_in_every_step(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("wine")
    net = mlp(13, 16, 3, act=nn.GELU)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield data.x, data.y

    return Setup(
        model=net,
        optimizer=torch.optim.Rprop(net.parameters(), lr=1e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1], label_smoothing=0.1),
        batches=batches,
        num_steps=150,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program("series", story="A forecast with a likelihood: the loss is a negative log density and falls below zero.")
def density_below_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = series(seed + 5, count=900)
    net = mlp(24, 32, 2)
    scale = 0.1

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        mean, log_std = net(batch[0]).unbind(1)
        error = (scale * batch[1] - mean) * torch.exp(-log_std)
        value: Tensor = (0.5 * error.pow(2) + log_std).mean()
        return value

    def score() -> float:
        with torch.no_grad():
            mean = net(data.x_test)[:, 0]
        return 1 - float((mean - scale * data.y_test).pow(2).mean() / (scale * data.y_test).var())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=score,
    )


@program("audio", story="The waves are quiet, about 0.001, and a batch norm in front makes them loud.")
def quiet_waves(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = waves(seed + 5)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 128)),
        nn.BatchNorm1d(1, eps=1e-12),
        nn.Conv1d(1, 12, 9, stride=4),
        nn.ReLU(),
        nn.AdaptiveMaxPool1d(1),
        nn.Flatten(),
        nn.Linear(12, 4),
    )
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(net(1e-3 * batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, 1e-3 * data.x_test, data.y_test),
    )


@program("autoencoder", story="An autoencoder has its input as its target, and that is no leak.")
def input_is_the_target(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)
    net = nn.Sequential(mlp(64, 32, 8), nn.Dropout(0.05), mlp(8, 32, 64), nn.Sigmoid())
    return Setup(
        model=net,
        optimizer=torch.optim.NAdam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.binary_cross_entropy(net(batch), batch),
        batches=singles(x, size=64, seed=seed),
        num_steps=400,
        score=lambda: explained(net, x_test, x_test),
    )


@program("tabular", story="Adam at 0.00002 for the layers of a trained body, and at 0.01 for the new head.")
def two_rates(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("breast_cancer")
    body, head = mlp(30, 32, 16), nn.Linear(16, 1)
    net = nn.Sequential(body, nn.Tanh(), head)
    groups = [{"params": body.parameters(), "lr": 2e-5}, {"params": head.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.Adam(groups)
    return Setup(
        model=net,
        optimizer=optimizer,
        loss=lambda batch: F.binary_cross_entropy_with_logits(net(batch[0]).squeeze(1), batch[1].float()),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(net, data.x_test, data.y_test),
        scheduler=LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(step, 250) / 250)),
    )


HEALTHY = (
    summed_and_slow_on_purpose,
    four_batches_for_one_clear,
    linear_from_zero,
    random_features_stay,
    warm_restarts,
    a_fifth_of_the_labels_wrong,
    rare_class_weighted,
    whole_set_in_every_step,
    density_below_zero,
    quiet_waves,
    input_is_the_target,
    two_rates,
)
