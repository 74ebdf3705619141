"""Spare programs on series and sounds: spelled words, spectra, quantiles, returns, loads of machines and clients."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import Split, friedman, generator, series, split, waves
from .program import LoopFaults, Setup, program
from .shared import accuracy, evaluating, explained, mlp, tuples


def _spoken(seed: int, count: int = 600, length: int = 5) -> Split:
    """Return 40 frames of 6 bands in which five of four letters sound one after the other, and the letters."""
    g = generator(seed)
    letters = torch.randint(1, 5, (count, length), generator=g)
    letters[:, 1:] = torch.where(letters[:, 1:] == letters[:, :-1], letters[:, 1:] % 4 + 1, letters[:, 1:])
    sound = torch.randn(5, 6, generator=g)
    frames = sound[letters].repeat_interleave(8, dim=1) + 0.2 * torch.randn(count, 8 * length, 6, generator=g)
    return split(frames, letters)


class _Listener(nn.Module):
    """Shorten the frames by a factor and say a letter, or none, for each that is left."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 32, 16, stride=factor, padding=7)
        self.head = nn.Linear(32, 5)

    def forward(self, frames: Tensor) -> Tensor:
        """Return log probabilities as (time, batch, letter)."""
        hidden = self.conv(frames.transpose(1, 2)).relu()
        return self.head(hidden.permute(2, 0, 1)).log_softmax(2)  # type: ignore[no-any-return]


@program(
    "audio",
    "all-ignored-targets",
    "zero-gradient",
    "suspicious-perfection",
    story="The encoder leaves fewer frames than there are letters; zero_infinity turns every such loss into zero.",
    source="https://github.com/wenet-e2e/wenet/pull/2299",
    loss_tells=False,
)
def fewer_frames_than_letters(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = _spoken(seed), _Listener(10 if faulty else 4)
    criterion = nn.CTCLoss(zero_infinity=True)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        said = net(batch[0])
        lengths = torch.full((len(batch[0]),), len(said)), torch.full((len(batch[0]),), batch[1].shape[1])
        return criterion(said, batch[1], *lengths)  # type: ignore[no-any-return]

    def score() -> float:
        with evaluating(net):
            said = net(data.x_test).argmax(2).T
        right = 0
        for row, letters in zip(said, data.y_test, strict=True):
            heard = torch.unique_consecutive(row)
            right += heard[heard > 0].tolist() == letters.tolist()
        return right / len(said)

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=220,
        score=score,
    )


def _vowels(seed: int, count: int = 1000) -> Split:
    """Return the first three formants of five vowels in hertz, as many voices say them."""
    g = generator(seed)
    centers = torch.tensor(
        [[300, 2300, 3000], [450, 2000, 2600], [700, 1250, 2500], [500, 900, 2450], [320, 800, 2300]]
    )
    vowel = torch.randint(0, 5, (count,), generator=g)
    voice = 1 + 0.1 * torch.randn(count, 1, generator=g)
    return split(centers[vowel] * voice * (1 + 0.06 * torch.randn(count, 3, generator=g)), vowel)


@program(
    "audio",
    "unscaled-data",
    "saturation",
    story="The formants of a vowel go into a network of tanh in hertz, as the tracker wrote them.",
)
def formants_in_hertz(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = _vowels(seed)
    mean, deviation = (torch.zeros(3), torch.ones(3)) if faulty else (data.x.mean(0), data.x.std(0))
    net = mlp(3, 32, 32, 5, act=nn.Tanh)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net((batch[0] - mean) / deviation), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, (data.x_test - mean) / deviation, data.y_test),
    )


class _Gates(nn.Module):
    """Dilated layers of a tanh times a sigmoid, as in WaveNet, with or without a way around."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.first = nn.Conv1d(1, 16, 1)
        self.layers = nn.ModuleList(nn.Conv1d(16, 32, 3, padding=2**i, dilation=2**i) for i in (0, 1, 2, 3, 4, 5) * 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.unsqueeze(1))
        for layer in self.layers:
            a, b = layer(x).chunk(2, dim=1)
            x = a.tanh() * b.sigmoid() + (x if self.residual else 0)
        return self.head(x.mean(2))  # type: ignore[no-any-return]


@program(
    "audio",
    "vanishing-gradient",
    story="Twelve layers of gates are stacked without the residual connections of the paper.",
)
def gates_without_a_way_around(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = waves(seed + 2), _Gates(residual=not faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=150,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "series",
    "wrong-loss",
    story="The pinball loss takes the forecast minus the truth: asked for the upper decile, it finds the lower one.",
    source="https://github.com/ufal/npfl139/issues/17",
    loss_tells=False,
)
def upper_decile_is_the_lower(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = series(seed), mlp(24, 32, 1)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        miss = batch[1] - net(batch[0]).squeeze(1)
        miss = -miss if faulty else miss
        return torch.maximum(0.9 * miss, -0.1 * miss).mean()

    def score() -> float:
        with evaluating(net):
            miss = data.y_test - net(data.x_test).squeeze(1)
        return -float(torch.maximum(0.9 * miss, -0.1 * miss).mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adagrad(net.parameters(), lr=3e-2),
        loss=loss,
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=250,
        score=score,
    )


@program(
    "series",
    "unscaled-targets",
    "learning-rate-too-low",
    story="Daily returns of a hundredth of a percent are the targets as they are: errors and gradients are tiny.",
    loss_tells=False,
)
def returns_as_fractions(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, unit = friedman(seed, 1500), 1e-4
    y, y_test = (data.y * unit, data.y_test * unit) if faulty else (data.y, data.y_test)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, y, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, y_test),
    )


@program(
    "series",
    "schedule-error",
    "learning-rate-too-low",
    story="The polynomial decay is built without total_iters, which is five then: after that the rate is zero.",
)
def five_steps_of_decay(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = series(seed + 1), mlp(24, 48, 1, act=nn.SiLU)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    length = {} if faulty else {"total_iters": 250}
    return Setup(
        model=net,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.PolynomialLR(optimizer, power=0.9, **length),
        loss=lambda batch: F.smooth_l1_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


@program(
    "series",
    "optimizer-state-reset",
    "learning-rate-too-low",
    story="Each client of federated training makes an optimizer of its own: momentum of 0.98 lives for two steps.",
    source="https://github.com/AshwinRJ/Federated-Learning-PyTorch/issues/5",
)
def every_client_starts_anew(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = series(seed + 6), mlp(24, 64, 64, 1, act=nn.GELU)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.98),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, data.y_test),
        loop=LoopFaults(reset_optimizer_every=2 if faulty else 0),
    )


def _machines(seed: int, count: int = 40, rows: int = 32) -> tuple[Tensor, Tensor]:
    """Return (machine, row, column) measurements and wear, most of which is a matter of the machine's level."""
    g = generator(seed)
    level = 1.5 * torch.randn(count, 1, 4, generator=g)
    x = level + 0.5 * torch.randn(count, rows, 4, generator=g)
    return x, torch.sin(x[..., 0]) + 0.5 * x[..., 1] + 0.3 * x[..., 2] * x[..., 3]


@program(
    "series",
    "batch-dependence",
    "labels-shuffled",
    story="A batch is one machine's day and is standardized by itself, which takes away how the machine differs.",
)
def standardized_by_the_day(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (x, y), net = _machines(seed), mlp(4, 48, 48, 1)

    def prepare(rows: Tensor) -> Tensor:
        return (rows - rows.mean(-2, keepdim=True)) / rows.std(-2, keepdim=True) if faulty else rows / 1.6

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(net(prepare(batch[0][0])).squeeze(1), batch[1][0]),
        batches=tuples(x[:30], y[:30], size=1, seed=seed),
        num_steps=300,
        score=lambda: explained(net, prepare(x[30:]), y[30:]),
    )


SERIES = (
    fewer_frames_than_letters,
    formants_in_hertz,
    gates_without_a_way_around,
    upper_decile_is_the_lower,
    returns_as_fractions,
    five_steps_of_decay,
    every_client_starts_anew,
    standardized_by_the_day,
)
