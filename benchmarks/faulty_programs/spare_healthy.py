"""Spare healthy programs that look strange: masks, a rate of thirty, noisy updates, and weights of signs."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, friedman, generator, prose, series, table
from .program import Setup, program
from .shared import accuracy, binary_accuracy, explained, mlp, tuples


@program("vision", story="A winning ticket: 85 in 100 weights are masked to zero for good and get no gradient.")
def pruned_from_the_start(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), mlp(64, 128, 64, 10)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() == 2:
                mask = (torch.rand(p.shape) < 0.15).float()
                p.mul_(mask / math.sqrt(0.15))
                p.register_hook(lambda gradient, mask=mask: gradient * mask)  # type: ignore[no-untyped-call]
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0].flatten(1)), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test.flatten(1), data.y_test),
    )


class _Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.rnn, self.head = nn.Embedding(32, 24), nn.GRU(24, 64, batch_first=True), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.letters(ids))[0])  # type: ignore[no-any-return]


@program(
    "language", story="As in AWD-LSTM: plain SGD at a rate of 30, which the clipping to a norm of 0.02 makes sane."
)
def rate_of_thirty(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = prose(), _Letters()
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=30.0),
        loss=lambda batch: F.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
        config={"training": {"max_grad_norm": 0.02}},
    )


class _Langevin(torch.optim.SGD):
    """SGD that adds noise to every update, to sample weights instead of finding the best."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, noise: float, seed: int) -> None:
        super().__init__(params, lr=lr)
        self.noise, self.generator = noise, generator(seed)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape, generator=self.generator), alpha=self.noise)
        return None


@program(
    "tabular", story="Stochastic gradient Langevin dynamics: noise goes into every update, and the loss never settles."
)
def weights_are_sampled(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = table("breast_cancer"), mlp(30, 24, 1, act=nn.Tanh)
    return Setup(
        model=net,
        optimizer=_Langevin(net.parameters(), lr=0.1, noise=0.006, seed=seed),
        loss=lambda batch: F.binary_cross_entropy_with_logits(net(batch[0]).squeeze(1), batch[1].float()),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: binary_accuracy(net, data.x_test, data.y_test),
    )


class _Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity within [-1, 1]."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return torch.where(w >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return gradients[0] * (w.abs() <= 1)  # type: ignore[no-any-return]


class _Binary(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        signs: Tensor = _Sign.apply(self.weight)  # type: ignore[no-untyped-call]
        return F.linear(x, signs / math.sqrt(self.in_features), self.bias)


@program("vision", story="A network of weights that are -1 or 1: the gradient is passed straight through the sign.")
def weights_are_signs(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = nn.Sequential(nn.Flatten(), _Binary(64, 128), nn.BatchNorm1d(128), nn.ReLU(), _Binary(128, 10))
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "series", story="Three tasks come in turn, a hundred steps each, with some old ones mixed in: the loss jumps twice."
)
def tasks_in_turn(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net, g = friedman(seed), mlp(11, 64, 64, 1, act=nn.GELU), generator(seed)
    factors = (1.0, -1.0, 0.3)

    def with_task(x: Tensor, task: int) -> Tensor:
        return torch.cat([x, F.one_hot(torch.tensor(task), 3).float().expand(len(x), 3)], dim=1)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        step = 0
        while True:
            newest = min(step // 100, 2)
            parts = []
            for task, size in [(newest, 48), *((old, 16) for old in range(newest))]:
                rows = torch.randint(0, len(data.x), (size,), generator=g)
                parts.append((with_task(data.x[rows], task), factors[task] * data.y[rows]))
            step += 1
            yield torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def score() -> float:
        return sum(explained(net, with_task(data.x_test, t), f * data.y_test) for t, f in enumerate(factors)) / 3

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=batches,
        num_steps=300,
        score=score,
    )


@program("tabular", story="Rprop on all rows at once: no rate to choose, and gradients only count by their sign.")
def resilient_steps(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = table("diabetes"), mlp(10, 16, 1, act=nn.Tanh)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = sum((p.square().sum() for p in net.parameters()), torch.zeros(()))
        return F.mse_loss(net(batch[0]).squeeze(1), batch[1]) + 0.01 * penalty

    return Setup(
        model=net,
        optimizer=torch.optim.Rprop(net.parameters(), lr=1e-4),
        loss=loss,
        batches=tuples(data.x, data.y, size=len(data.x), seed=seed),
        num_steps=150,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


class _Block(nn.Module):
    """A block whose share in the sum starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.share = mlp(width, width, width), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.share * self.inner(x)  # type: ignore[no-any-return]


@program(
    "series", story="ReZero: all of twelve blocks are multiplied by zero at first, so that most gradients are zero."
)
def blocks_from_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = series(seed)
    net = nn.Sequential(nn.Linear(24, 32), *(_Block(32) for _ in range(12)), nn.Linear(32, 1))
    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=200,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


HEALTHY = (
    pruned_from_the_start,
    rate_of_thirty,
    weights_are_sampled,
    weights_are_signs,
    tasks_in_turn,
    resilient_steps,
    blocks_from_zero,
)
