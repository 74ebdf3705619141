"""Small objectives that train well without a guard. Each is a program for `twins.compare`."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.seen.twins import Drive

Pair = tuple[Tensor, Tensor]


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


def teacher(x: Tensor) -> Tensor:
    """A smooth function of the first four inputs that a small net can learn."""
    return (torch.sin(2.0 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3]).unsqueeze(1)


def blobs(count: int, rng: torch.Generator, *, classes: int = 10, width: int = 16, spread: float = 1.0) -> Pair:
    """Gaussian clusters around the same centres every time."""
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(77))
    y = torch.randint(classes, (count,), generator=rng)
    return centres[y] + spread * torch.randn(count, width, generator=rng), y


def generators(seed: int) -> tuple[torch.Generator, torch.Generator]:
    """One for the training data of this seed, one for held-out data that is the same for all."""
    return torch.Generator().manual_seed(1000 + seed), torch.Generator().manual_seed(999_999)


@dataclass(frozen=True)
class NoisyRegression:
    """tanh MLP, SGD with momentum 0.9, Gaussian label noise."""

    lr: float = 0.05
    noise: float = 0.3
    size: int = 32
    steps: int = 1200

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        model = mlp(4, 32, 32, 1, act=nn.Tanh)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)
        x_val = torch.randn(512, 4, generator=held)
        drive.ends(lambda: functional.mse_loss(model(x_val), teacher(x_val)).item(), model)
        update = drive.over(model, optimizer)
        for _ in range(self.steps):
            x = torch.randn(self.size, 4, generator=rng)
            y = teacher(x) + self.noise * torch.randn(self.size, 1, generator=rng)
            update(lambda b: functional.mse_loss(model(b[0]), b[1]), (x, y))


def _student(shape: tuple[int, int], freedom: int, rng: torch.Generator) -> Tensor:
    chi = torch.randn(freedom, *shape, generator=rng).square().sum(0)
    return torch.randn(*shape, generator=rng) / (chi / freedom).sqrt()


def _pareto(shape: tuple[int, int], alpha: float, rng: torch.Generator) -> Tensor:
    return torch.rand(*shape, generator=rng).clamp_min(1e-6).pow(-1.0 / alpha) - 1.0


@dataclass(frozen=True)
class HeavyTails:
    """Targets with noise of infinite variance: Student's t with 2 degrees of freedom, or Pareto with exponent 1.5."""

    tail: str = "student"
    steps: int = 1200

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        model = mlp(4, 32, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        x_val = torch.randn(512, 4, generator=held)
        drive.ends(lambda: functional.l1_loss(model(x_val), teacher(x_val)).item(), model)
        update = drive.over(model, optimizer)
        for _ in range(self.steps):
            x = torch.randn(32, 4, generator=rng)
            tail = _student((32, 1), 2, rng) if self.tail == "student" else _pareto((32, 1), 1.5, rng)
            update(lambda b: functional.mse_loss(model(b[0]), b[1]), (x, teacher(x) + tail))


@dataclass(frozen=True)
class GrowingTargets:
    """The targets double every `doubling` steps, as returns do while a policy improves."""

    doubling: int = 200
    steps: int = 1200

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        model = mlp(4, 32, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        x_val = torch.randn(512, 4, generator=held)
        scale = 2.0 ** (self.steps / self.doubling)
        drive.ends(lambda: functional.mse_loss(model(x_val) / scale, teacher(x_val)).item(), model)
        update = drive.over(model, optimizer)
        for step in range(self.steps):
            x = torch.randn(32, 4, generator=rng)
            update(lambda b: functional.mse_loss(model(b[0]), b[1]), (x, teacher(x) * 2.0 ** (step / self.doubling)))


class VAE(nn.Module):
    """Bernoulli pixels, four latent numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 64, 8), mlp(4, 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        pixels = functional.binary_cross_entropy_with_logits(self.decoder(z), x, reduction="sum")
        return pixels - 0.5 * (1.0 + log_var - mean.square() - log_var.exp()).sum()


def bars(count: int, rng: torch.Generator) -> Tensor:
    """8 x 8 images of a few horizontal and vertical bars."""
    rows, columns = torch.rand(count, 8, 1, generator=rng) < 0.2, torch.rand(count, 1, 8, generator=rng) < 0.2
    return (rows | columns).float().reshape(count, 64)


@dataclass(frozen=True)
class SumVAE:
    """A VAE whose loss is the sum over the batch, as in torch's examples; Adam 1e-3, batches of 64."""

    steps: int = 1000

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        model = VAE()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        x_val = bars(256, held)
        drive.ends(lambda: model(x_val).item() / 256, model)
        update = drive.over(model, optimizer)
        for _ in range(self.steps):
            update(model, bars(64, rng))


@dataclass(frozen=True)
class InfoNCE:
    """Two noisy views of each example, temperature 0.07, batches of 64, Adam 1e-3."""

    steps: int = 1000

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        model = mlp(16, 64, 16)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def loss_of(x: Tensor, rng: torch.Generator) -> Tensor:
            views = [
                functional.normalize(model(x + 0.3 * torch.randn(*x.shape, generator=rng)), dim=1) for _ in range(2)
            ]
            return functional.cross_entropy(views[0] @ views[1].T / 0.07, torch.arange(len(x)))

        x_val = torch.randn(256, 16, generator=held)
        drive.ends(lambda: loss_of(x_val, torch.Generator().manual_seed(5)).item(), model)
        update = drive.over(model, optimizer)
        for step in range(self.steps):
            x = torch.randn(64, 16, generator=rng)
            update(lambda b, n=step: loss_of(b, torch.Generator().manual_seed(n)), x)


@dataclass(frozen=True)
class ClassesInTurn:
    """Data sorted by class: 30 steps of each of ten, over and over; SGD 0.05."""

    per_class: int = 30
    steps: int = 1200

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        model = mlp(16, 64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x_val, y_val = blobs(512, held)
        drive.ends(lambda: functional.cross_entropy(model(x_val), y_val).item(), model)
        update = drive.over(model, optimizer)
        x, y = blobs(4000, rng)
        of_class = [x[y == label] for label in range(10)]
        for step in range(self.steps):
            label = step // self.per_class % 10
            rows = torch.randint(len(of_class[label]), (32,), generator=rng)
            update(
                lambda b: functional.cross_entropy(model(b[0]), b[1]), (of_class[label][rows], torch.full((32,), label))
            )


@dataclass(frozen=True)
class BatchesOfOne:
    """A classifier that sees one example per step; SGD 0.01 with momentum 0.9."""

    lr: float = 0.01
    spread: float = 0.8
    steps: int = 1500

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        model = mlp(16, 32, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)
        x_val, y_val = blobs(512, held, spread=self.spread)
        drive.ends(lambda: functional.cross_entropy(model(x_val), y_val).item(), model)
        update = drive.over(model, optimizer)
        for _ in range(self.steps):
            update(lambda b: functional.cross_entropy(model(b[0]), b[1]), blobs(1, rng, spread=self.spread))


@dataclass(frozen=True)
class Blobs:
    """Ten Gaussian clusters in batches of 32; Adam. The task to put faults and schedules into."""

    lr: float = 3e-3
    optimizer: str = "Adam"
    steps: int = 1200

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        model = mlp(16, 32, 10)
        kind = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[self.optimizer]
        optimizer = kind(model.parameters(), lr=self.lr)
        x_val, y_val = blobs(512, held)
        drive.ends(lambda: functional.cross_entropy(model(x_val), y_val).item(), model)
        update = drive.over(model, optimizer)
        for _ in range(self.steps):
            update(lambda b: functional.cross_entropy(model(b[0]), b[1]), blobs(32, rng))


@dataclass(frozen=True)
class RawInputs:
    """Features between 1 and 10,000 in size, straight into BatchNorm; Adam 1e-2."""

    steps: int = 800

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        scale, shift = torch.logspace(0, 4, 8), torch.linspace(0, 1000, 8)
        model = nn.Sequential(nn.BatchNorm1d(8), *mlp(8, 32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        x_val = torch.randn(512, 8, generator=held)
        drive.ends(
            lambda: functional.mse_loss(model.eval()(x_val * scale + shift), x_val.sum(1, keepdim=True)).item(), model
        )
        update = drive.over(model, optimizer)
        for _ in range(self.steps):
            x = torch.randn(64, 8, generator=rng)
            update(lambda b: functional.mse_loss(model(b[0]), b[1]), (x * scale + shift, x.sum(1, keepdim=True)))


@dataclass(frozen=True)
class NanMetric:
    """Regression whose loss has a constant added that is NaN on three batches of ten: its gradient is that of the rest.

    `in_a_row` such batches come one after another. Adam 3e-3.
    """

    in_a_row: int = 1
    share: float = 0.3
    steps: int = 1000

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        model = mlp(4, 32, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        x_val = torch.randn(512, 4, generator=held)
        drive.ends(lambda: functional.mse_loss(model(x_val), teacher(x_val)).item(), model)
        bad = (torch.rand(self.steps // self.in_a_row + 1, generator=rng) < self.share).repeat_interleave(self.in_a_row)
        update = drive.over(model, optimizer)
        for step in range(self.steps):
            x = torch.randn(32, 4, generator=rng)
            extra = torch.tensor(math.nan if bad[step] else 0.01)
            update(lambda b: functional.mse_loss(model(b[0]), b[1]) + b[2], (x, teacher(x), extra))


@dataclass(frozen=True)
class RareReward:
    """Nine steps of ten have no error at all, so every gradient is exactly zero; SGD 0.05."""

    steps: int = 1000

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        model = mlp(4, 32, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x_val = torch.randn(512, 4, generator=held)
        drive.ends(lambda: functional.mse_loss(model(x_val), teacher(x_val)).item(), model)
        update = drive.over(model, optimizer)
        for step in range(self.steps):
            x, counts = torch.randn(32, 4, generator=rng), torch.tensor(float(step % 10 == 0))
            update(lambda b: functional.mse_loss(model(b[0]), b[1]) * b[2], (x, teacher(x), counts))


def ring(count: int, rng: torch.Generator) -> Tensor:
    """Eight Gaussians on a circle."""
    angle = torch.randint(8, (count,), generator=rng) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2, generator=rng)


@dataclass(frozen=True)
class GAN:
    """Discriminator and generator in turn, Adam 1e-3 (0.5, 0.999), one guard each."""

    steps: int = 1000

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        judge, maker = mlp(2, 64, 64, 1), mlp(8, 64, 64, 2)
        one = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
        two = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
        noise, real = torch.randn(512, 8, generator=held), ring(512, held)
        drive.ends(lambda: _energy_distance(maker(noise), real), judge, maker)
        step_judge, step_maker = drive.over(judge, one), drive.over(maker, two)
        yes, no = torch.ones(64, 1), torch.zeros(64, 1)
        bce = functional.binary_cross_entropy_with_logits
        for _ in range(self.steps):
            x, z = ring(64, rng), torch.randn(64, 8, generator=rng)
            step_judge(lambda b: bce(judge(b[0]), yes) + bce(judge(maker(b[1]).detach()), no), (x, z))
            judge.requires_grad_(False)  # as Lightning's toggle_optimizer does
            step_maker(lambda b: bce(judge(maker(b)), yes), z)
            judge.requires_grad_(True)


def _energy_distance(a: Tensor, b: Tensor) -> float:
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()
