"""Held programs whose fault is in the loop, the optimizer, or a term of the loss, most of them half-learning."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, friedman, generator, split
from .held_tabular import Mixture
from .program import LoopFaults, Setup, program
from .shared import accuracy, evaluating, explained, indices, mlp, tuples


@program(
    "regression",
    "wrong-loss",
    story="A Gaussian likelihood is written without the logarithm of the variance: doubt costs nothing.",
    loss_tells=False,
)
def doubt_is_free(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed)
    net = mlp(8, 32, 2, act=nn.Mish)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        mean, raw = net(batch[0]).unbind(1)
        variance = (2 * raw).exp()
        each = (batch[1] - mean).square() / variance
        return 0.5 * (each if faulty else each + variance.log()).mean()  # type: ignore[no-any-return]

    def score() -> float:
        with evaluating(net):
            mean = net(data.x_test)[:, 0]
        return 1 - float((mean - data.y_test).square().mean() / data.y_test.var())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=400,
        score=score,
    )


@program(
    "tabular",
    "optimizer-state-reset",
    "learning-rate-too-high",
    "oscillation",
    story="A helper that is called for every batch makes the Adagrad inside anew: its steps never become smaller.",
)
def adagrad_made_anew(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 3)
    net = mlp(8, 48, 48, 1)
    return Setup(
        model=net,
        optimizer=torch.optim.Adagrad(net.parameters(), lr=0.1),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=400,
        score=lambda: explained(net, data.x_test, data.y_test),
        loop=LoopFaults(reset_optimizer_every=1 if faulty else 0),
    )


def _regimes(seed: int, count: int = 1200) -> tuple[Tensor, Tensor]:
    """Return points whose rule depends on the quarter of the plane they lie in."""
    g = generator(seed)
    x = torch.randn(count, 6, generator=g)
    rules = torch.randn(4, 6, generator=g)
    quarter = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    y = (x * rules[quarter]).sum(1)
    return x, (y - y.mean()) / y.std()


@program(
    "mixture",
    "saturation",
    "zero-gradient",
    "frozen-parameters",
    story="The temperature of a gate is 0.0005: one expert has all the weight from the start, and the gate is stuck.",
)
def gate_without_doubt(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = split(*_regimes(seed))
    net = Mixture(6, 1, temperature=5e-4 if faulty else 0.5)
    for expert in net.experts:
        assert isinstance(expert, nn.Sequential)
        expert[1] = nn.Identity()  # linear experts: the gate alone can bend
    return Setup(
        model=net,
        optimizer=torch.optim.Adamax(net.parameters(), lr=0.02),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=400,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "oscillation",
    "learning-rate-too-high",
    story="Momentum 0.99 is added to SGD and the rate stays: the weights swing to and fro and come to no rest.",
)
def heavy_ball(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 6)
    net = mlp(8, 32, 32, 1, act=nn.Tanh)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.99 if faulty else 0.9),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


class _Sampler:
    """Draws rows with a generator that is seeded when its iteration starts."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed

    def __iter__(self) -> Iterator[Tensor]:
        return indices(self.count, self.size, self.seed)


@program(
    "tabular",
    "repeated-batch",
    "suspicious-perfection",
    story="Each step calls next(iter(loader)): a seeded sampler starts over and gives the same rows every time.",
    loss_tells=False,
)
def next_of_iter(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = mlp(64, 64, 10, act=nn.GELU)
    loader: Iterable[Tensor] = _Sampler(len(data.x), 24, seed)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        running = iter(loader)
        while True:
            rows = next(iter(loader)) if faulty else next(running)
            yield data.x[rows].flatten(1), data.y[rows]

    return Setup(
        model=net,
        optimizer=torch.optim.RAdam(net.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=batches,
        num_steps=300,
        score=lambda: accuracy(net, data.x_test.flatten(1), data.y_test),
    )


@program(
    "rl",
    "unscaled-targets",
    "learning-rate-too-low",
    story="Q-learning on payments in cents, up to some ten thousand: the values creep towards them.",
    loss_tells=False,
)
def payments_in_cents(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed)
    unit = 10_000.0 if faulty else 1.0
    taste = torch.randn(6, 4, generator=g)
    states = torch.randn(1500, 6, generator=g)
    paid = unit * (2 + torch.sin(states @ taste))
    net = mlp(6, 48, 4)

    def replay() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for rows in indices(1200, 64, seed):
            action = torch.randint(0, 4, (64,), generator=g)
            yield states[rows], action, paid[rows, action]

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        told = net(batch[0]).gather(1, batch[1].unsqueeze(1)).squeeze(1)
        return F.smooth_l1_loss(told, batch[2])

    def score() -> float:
        with evaluating(net):
            chosen = net(states[1200:]).argmax(1, keepdim=True)
        return float(paid[1200:].gather(1, chosen).mean()) / unit

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3),
        loss=loss,
        batches=replay,
        num_steps=500,
        score=score,
    )


@program(
    "regression",
    "clipping-too-tight",
    "learning-rate-too-low",
    story="A config that had been tuned for gradients in another unit clips their norm at 0.002 before SGD.",
)
def clipped_in_another_unit(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 8)
    net = mlp(8, 40, 40, 1, act=nn.SiLU)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-5),
        loss=lambda batch: F.huber_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=350,
        score=lambda: explained(net, data.x_test, data.y_test),
        config={"training": {"max_grad_norm": 2e-3 if faulty else 2.0}},
    )


@program(
    "regression",
    "learning-rate-too-low",
    story="Adagrad keeps the rate 0.001 that had been good for Adam; its steps also shrink, so the fit is half done.",
)
def rate_of_adam_for_adagrad(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 9)
    x, y, x_test, y_test = (t.double() for t in (data.x, data.y, data.x_test, data.y_test))
    net = mlp(8, 64, 64, 1, act=nn.Tanh).double()
    return Setup(
        model=net,
        optimizer=torch.optim.Adagrad(net.parameters(), lr=1e-3 if faulty else 3e-2),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(x, y, size=32, seed=seed),
        num_steps=400,
        score=lambda: explained(net, x_test, y_test),
    )


LOOPS = (
    doubt_is_free,
    adagrad_made_anew,
    gate_without_doubt,
    heavy_ball,
    next_of_iter,
    payments_in_cents,
    clipped_in_another_unit,
    rate_of_adam_for_adagrad,
)
