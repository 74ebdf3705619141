"""Held healthy oddities: they look wrong and are right."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import LambdaLR

from .data import digits, friedman, generator, series, split, table
from .program import Setup, program
from .shared import accuracy, evaluating, explained, indices, mlp, singles, tuples


@program(
    "tabular", story="The rate warms up with the fifth power of time: for a third of the run hardly anything moves."
)
def flat_first_third(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data = friedman(seed + 30)
    net = mlp(8, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return Setup(
        model=net,
        optimizer=optimizer,
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, data.y_test),
        scheduler=LambdaLR(optimizer, lambda step: min(1.0, (step / 240) ** 5)),
    )


@program(
    "tabular", story="Inputs are grown from easy to hard: the loss rises in the middle of the run.", loss_tells=False
)
def curriculum_grows_harder(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data, g = digits(), generator(seed)
    net = mlp(64, 48, 10)

    def harder() -> Iterator[tuple[Tensor, Tensor]]:
        for step, rows in enumerate(indices(len(data.x), 32, seed)):
            noise = min(step / 200, 1.0) * 0.6 * torch.randn(32, 64, generator=g)
            yield data.x[rows].flatten(1) + noise, data.y[rows]

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=harder,
        num_steps=250,
        score=lambda: accuracy(net, data.x_test.flatten(1), data.y_test),
    )


@program("rl", story="One of twelve answers pays, so eleven of twelve rewards are zero at first.", loss_tells=False)
def rewards_are_rare(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    g = generator(seed)
    policy = nn.Linear(12, 12)
    with torch.no_grad():
        policy.weight.mul_(0.1)

    def rounds() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            state = torch.randint(0, 12, (64,), generator=g)
            with torch.no_grad():
                chosen = torch.multinomial(policy(F.one_hot(state, 12).float()).softmax(1), 1, generator=g).squeeze(1)
            yield F.one_hot(state, 12).float(), chosen, (chosen == (5 * state + 1) % 12).float()

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        told = policy(batch[0]).log_softmax(1).gather(1, batch[1].unsqueeze(1)).squeeze(1)
        return -(told * (batch[2] - 0.05)).mean()  # type: ignore[no-any-return]

    def score() -> float:
        with torch.no_grad():
            best = policy(torch.eye(12)).argmax(1)
        return float((best == (5 * torch.arange(12) + 1) % 12).float().mean())

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=0.05),
        loss=loss,
        batches=rounds,
        num_steps=300,
        score=score,
    )


@program("tabular", story="Columns reach into the millions, and the first layer of the model is a batch norm for them.")
def normalizes_by_itself(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data = table("wine")
    scale = 10.0 ** torch.arange(13).remainder(7)
    net = nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 3))
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(scale * (data.x + 5), data.y, size=32, seed=seed),
        num_steps=150,
        score=lambda: accuracy(net, scale * (data.x_test + 5), data.y_test),
    )


class _Readout(nn.Module):
    """A reservoir that is never trained, and a readout that is."""

    def __init__(self) -> None:
        super().__init__()
        self.reservoir = mlp(24, 128, 128, act=nn.Tanh).requires_grad_(False)
        self.readout = nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.reservoir(x)).squeeze(-1)  # type: ignore[no-any-return]


@program("series", story="The body is random and frozen on purpose; one linear layer is trained on what it makes.")
def reservoir_is_frozen(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data, net = series(seed), _Readout()
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.readout.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


@program("tabular", story="Two of a hundred rows are positive; the loss starts low because the bias knows that.")
def two_in_a_hundred(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    g = generator(seed)
    x = torch.randn(3000, 6, generator=g)
    worth = x[:, 0] + 0.7 * x[:, 1] * x[:, 2]
    data = split(x, (worth > worth.quantile(0.98)).float())
    net = mlp(6, 32, 1)
    last = net[-1]
    assert isinstance(last, nn.Linear)
    nn.init.constant_(last.bias, -3.9)

    def score() -> float:
        with evaluating(net):
            told = net(data.x_test).squeeze(1)
        positive, negative = told[data.y_test > 0.5], told[data.y_test < 0.5]
        return float((positive.unsqueeze(1) > negative.unsqueeze(0)).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.binary_cross_entropy_with_logits(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=128, seed=seed),
        num_steps=300,
        score=score,
    )


@program("vision", story="Labels are smoothed by 0.4 over ten classes: the loss cannot fall far below 1.5.")
def smoothed_a_lot(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data = digits()
    net = mlp(64, 48, 10, act=nn.GELU)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.4)
    return Setup(
        model=net,
        optimizer=torch.optim.NAdam(net.parameters(), lr=3e-3),
        loss=lambda batch: criterion(net(batch[0].flatten(1)), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, data.x_test.flatten(1), data.y_test),
    )


@program("regression", story="Three quarters of the variance are noise: the loss falls by a quarter and stays there.")
def mostly_noise(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data, g = friedman(seed + 40, count=4000), generator(seed)
    noisy = data.y + 1.5 * torch.randn(len(data.y), generator=g)
    net = mlp(8, 24, 1, act=nn.SiLU)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=4e-3, weight_decay=1e-4),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, noisy, size=128, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


@program("tabular", story="Gradients are clipped at 0.05 in every step; Adam does not mind the size.")
def clipped_at_each_step(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data = friedman(seed + 50)
    net = mlp(8, 32, 32, 1)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.l1_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, data.y_test),
        config={"training": {"max_grad_norm": 0.05}},
    )


class _Tied(nn.Module):
    """An autoencoder whose decoder is the transpose of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 16) / 8)
        self.biases = nn.ParameterList([torch.zeros(16), torch.zeros(64)])

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x @ self.weight + self.biases[0]) @ self.weight.T + self.biases[1]  # type: ignore[no-any-return]


@program("autoencoder", story="Encoder and decoder are one matrix and its transpose.")
def transpose_of_itself(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data, net = digits(), _Tied()
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)

    def score() -> float:
        with evaluating(net):
            return 1 - float((net(x_test) - x_test).square().mean() / (x_test - x_test.mean(0)).square().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.RMSprop(net.parameters(), lr=2e-3),
        loss=lambda batch: F.mse_loss(net(batch), batch),
        batches=singles(x, size=64, seed=seed),
        num_steps=300,
        score=score,
    )


@program("vision", story="SGD at 0.00004 looks far too low; the loss is a sum over a batch of 256.")
def tiny_rate_of_a_sum(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data = digits()
    net = nn.Linear(64, 10)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=4e-5, momentum=0.95),
        loss=lambda batch: F.cross_entropy(net(batch[0].flatten(1)), batch[1], reduction="sum"),
        batches=tuples(data.x, data.y, size=256, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test.flatten(1), data.y_test),
    )


@program("vision", story="Twenty images are learned by heart on purpose, as a check of the code; the score is on them.")
def learned_by_heart(faulty: bool, seed: int) -> Setup:
    del faulty
    torch.manual_seed(seed)
    data = digits()
    few, labels = data.x[:20].flatten(1), data.y[:20]
    net = mlp(64, 32, 10)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=lambda: itertools.repeat((few, labels)),
        num_steps=150,
        score=lambda: accuracy(net, few, labels),
    )


HEALTHY = (
    flat_first_third,
    curriculum_grows_harder,
    rewards_are_rare,
    normalizes_by_itself,
    reservoir_is_frozen,
    two_in_a_hundred,
    smoothed_a_lot,
    mostly_noise,
    clipped_at_each_step,
    transpose_of_itself,
    tiny_rate_of_a_sum,
    learned_by_heart,
)
