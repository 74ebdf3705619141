"""Denoising diffusion of points on a ring of eight clusters, in 40 noise levels."""

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .data import generator, ring
from .program import Setup, program
from .shared import energy_distance, evaluating, indices, mlp

LEVELS = 40


def signal_share() -> Tensor:
    """Return the share of the signal's variance that is left at each level, from nearly 1 to nearly 0."""
    return torch.cumprod(1 - torch.linspace(1e-3, 0.25, LEVELS), dim=0)


class _Denoiser(nn.Module):
    """Predicts the noise from the noisy point and a sine code of the level."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2 + 16, 96, 96, 2, act=nn.SiLU)

    def forward(self, point: Tensor, level: Tensor) -> Tensor:
        angle = level.unsqueeze(1).to(point.dtype) / LEVELS * torch.arange(1, 9).to(point.dtype)
        out: Tensor = self.net(torch.cat([point, angle.sin(), angle.cos()], dim=1))
        return out


def _batches(points: Tensor, seed: int, size: int = 128) -> Iterator[dict[str, Tensor]]:
    g = generator(seed)
    for rows in indices(len(points), size, seed):
        level = torch.randint(0, LEVELS, (size,), generator=g)
        noise, other = (torch.randn(size, 2, generator=g) for _ in range(2))
        yield {"point": points[rows], "level": level, "noise": noise, "other": other}


def _loss(model: nn.Module, batch: dict[str, Tensor], share: Tensor, target: str = "noise") -> Tensor:
    left = share[batch["level"]].unsqueeze(1)
    noisy = left.sqrt() * batch["point"] + (1 - left).sqrt() * batch["noise"]
    predicted: Tensor = model(noisy, batch["level"])
    return (predicted.float() - batch[target]).pow(2).mean()


def _score(model: nn.Module, points: Tensor) -> float:
    """Sample with the deterministic sampler; return minus the logarithm of the distance to the points."""
    share, x = signal_share(), torch.randn(400, 2, generator=generator(5))
    with evaluating(model):
        for level in range(LEVELS - 1, -1, -1):
            noise = model(x, torch.full((400,), level)).float()
            clean = (x - (1 - share[level]).sqrt() * noise) / share[level].sqrt()
            left = share[level - 1] if level else torch.tensor(1.0)
            x = left.sqrt() * clean.clamp(-1000, 1000) + (1 - left).sqrt() * noise
    return -math.log(energy_distance(x / points.std(), points[:400] / points.std()) + 1e-3)


def _points(seed: int) -> Tensor:
    return 0.6 * ring(seed)


@program(
    "diffusion",
    "learning-rate-too-low",
    "frozen-parameters",
    story="The base rate is multiplied by the number of GPUs, which is 0 on this machine; the loss stays at 1.0.",
    source="https://github.com/rinongal/textual_inversion/issues/98",
)
def rate_times_no_gpus(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model, points = _Denoiser(), _points(seed)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3 * (0 if faulty else 1)),
        loss=lambda batch: _loss(model, batch, signal_share()),
        batches=lambda: _batches(points, seed),
        num_steps=300,
        score=lambda: _score(model, _points(seed + 1000)),
    )


@program(
    "diffusion",
    "labels-shuffled",
    "output-independent-of-input",
    story="randn_like is called once more for the target: the network is asked for noise that was never added.",
)
def another_noise(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model, points = _Denoiser(), _points(seed)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: _loss(model, batch, signal_share(), "other" if faulty else "noise"),
        batches=lambda: _batches(points, seed),
        num_steps=300,
        score=lambda: _score(model, _points(seed + 1000)),
    )


@program(
    "diffusion",
    "unscaled-data",
    story="Pixel coordinates up to 255 are diffused with noise of variance 1: the noise cannot be seen in the input.",
)
def pixels_not_rescaled(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    unit = 200.0 if faulty else 1.0
    model, points = _Denoiser(), unit * _points(seed)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: _loss(model, batch, signal_share()),
        batches=lambda: _batches(points, seed),
        num_steps=300,
        score=lambda: _score(model, unit * _points(seed + 1000)),
    )


@program(
    "diffusion",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="The optimizer is given the parameters of the moving-average copy instead of the model that is trained.",
)
def average_in_the_optimizer(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model, points = _Denoiser(), _points(seed)
    average = copy.deepcopy(model)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam((average if faulty else model).parameters(), lr=3e-3),
        loss=lambda batch: _loss(model, batch, signal_share()),
        batches=lambda: _batches(points, seed),
        num_steps=300,
        score=lambda: _score(model, _points(seed + 1000)),
    )


@program(
    "diffusion",
    "non-finite",
    story="cumsum is written for cumprod: the signal's share exceeds 1 and the noise is scaled by the root of a "
    "negative number.",
)
def sum_for_product(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model, points = _Denoiser(), _points(seed)
    share = torch.cumsum(1 - torch.linspace(1e-3, 0.25, LEVELS), dim=0) if faulty else signal_share()
    return Setup(
        model=model,
        optimizer=torch.optim.RAdam(model.parameters(), lr=5e-3),
        loss=lambda batch: _loss(model, batch, share),
        batches=lambda: _batches(points, seed),
        num_steps=300,
        score=lambda: _score(model, _points(seed + 1000)),
    )


class _InBfloat16(nn.Module):
    """Runs a model in bfloat16, or as it is."""

    def __init__(self, inner: nn.Module, low: bool) -> None:
        super().__init__()
        self.inner = inner.bfloat16() if low else inner
        self.low = low

    def forward(self, point: Tensor, level: Tensor) -> Tensor:
        out: Tensor = self.inner(point.bfloat16() if self.low else point, level)
        return out


@program(
    "diffusion",
    "precision",
    "learning-rate-too-low",
    story="Weights are kept in bfloat16 without a float32 copy: updates of about 1e-4 are smaller than the "
    "spacing of the weights and are rounded away.",
    source="Zamirai et al., Revisiting BFloat16 training, 2020",
    same_start=False,
)
def updates_rounded_away(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model, points = _InBfloat16(_Denoiser(), low=faulty), _points(seed)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.99)),
        loss=lambda batch: _loss(model, batch, signal_share()),
        batches=lambda: _batches(points, seed),
        num_steps=600,
        score=lambda: _score(model, _points(seed + 1000)),
    )


DIFFUSION = (
    rate_times_no_gpus,
    another_noise,
    pixels_not_rescaled,
    average_in_the_optimizer,
    sum_for_product,
    updates_rounded_away,
)
