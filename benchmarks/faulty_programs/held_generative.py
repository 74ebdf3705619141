"""Held programs that generate, encode, or compare."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F  # noqa: N812

from .data import digits, ring
from .program import Setup, program
from .shared import mlp, singles, tuples


class _VAE(nn.Module):
    """Encode digits as 8 Gaussian numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 64, 16, act=nn.Softplus), mlp(8, 64, 64, act=nn.Softplus)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logvar = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * logvar).exp()), mean, logvar


@program(
    "vae",
    "regularisation-too-strong",
    "wrong-loss",
    "output-independent-of-input",
    story="The error is a mean over the pixels and the divergence a sum over the batch: every code becomes the prior.",
    source="https://github.com/clementchadebec/benchmark_VAE/issues/124",
    loss_tells=False,
)
def mean_error_and_summed_divergence(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    x, x_test = (4 * (t.flatten(1) - 0.3) for t in (data.x, data.x_test))
    vae = _VAE()

    def loss(batch: Tensor) -> Tensor:
        told, mean, logvar = vae(batch)
        divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum()
        if faulty:
            return F.mse_loss(told, batch) + divergence  # type: ignore[no-any-return]
        return (0.5 * (told - batch).square().sum() + divergence) / len(batch)  # type: ignore[no-any-return]

    def score() -> float:
        with torch.no_grad():
            told = vae.decoder(vae(x_test)[1])
        return 1 - float(F.mse_loss(told, x_test) / (x_test - x_test.mean(0)).square().mean())

    return Setup(
        model=vae,
        optimizer=torch.optim.Adam(vae.parameters(), lr=3e-3),
        loss=loss,
        batches=singles(x, size=64, seed=seed),
        num_steps=300,
        score=score,
    )


class _Denoiser(nn.Module):
    """Predict the noise in a point at a time from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2 + 8, 64, 64, 2, act=nn.SiLU)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t.unsqueeze(1) * torch.tensor([1.0, 2.0, 4.0, 8.0])
        return self.net(torch.cat([x, angles.sin(), angles.cos()], dim=1))  # type: ignore[no-any-return]


@program(
    "diffusion",
    "labels-shuffled",
    "wrong-loss",
    "output-independent-of-input",
    story="The noise that is added and the noise that is asked for are drawn one after the other, two different ones.",
)
def asked_for_other_noise(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    points = ring(seed)
    net = _Denoiser()

    def loss(x: Tensor) -> Tensor:
        t = torch.rand(len(x))
        keep = torch.cos(t * math.pi / 2).unsqueeze(1)
        noise = torch.randn_like(x)
        noisy = keep * x + (1 - keep.square()).sqrt() * noise
        wanted = torch.randn_like(x) if faulty else noise
        return (net(noisy, t) - wanted).square().mean()  # type: ignore[no-any-return]

    def score() -> float:
        g = torch.Generator().manual_seed(1)
        noise, t = torch.randn(500, 2, generator=g), torch.rand(500, generator=g)
        keep = torch.cos(t * math.pi / 2).unsqueeze(1)
        with torch.no_grad():
            told = net(keep * points[:500] + (1 - keep.square()).sqrt() * noise, t)
        return 1 - float(F.mse_loss(told, noise))

    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=3e-3),
        loss=loss,
        batches=singles(points, size=128, seed=seed),
        num_steps=300,
        score=score,
    )


@program(
    "contrastive",
    "non-finite",
    story="Distances of a batch to itself are roots of zero on the diagonal, whose slope is infinite.",
    source="https://github.com/tensorflow/tensorflow/issues/30199",
)
def distance_to_itself(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = mlp(64, 48, 8)

    def hardest(batch: tuple[Tensor, Tensor]) -> Tensor:
        code = net(batch[0].flatten(1))
        squared = (code.unsqueeze(0) - code.unsqueeze(1)).square().sum(2)
        far = (squared if faulty else squared + 1e-8).sqrt()
        same = batch[1].unsqueeze(0) == batch[1].unsqueeze(1)
        positive, negative = (far * same).amax(1), (far + 1e3 * same).amin(1)
        return F.softplus(positive - negative).mean()

    def score() -> float:
        with torch.no_grad():
            seen, asked = net(data.x.flatten(1)), net(data.x_test.flatten(1))
        if not bool(asked.isfinite().all()):
            return 0.0
        centers = torch.stack([seen[data.y == k].mean(0) for k in range(10)])
        return float((torch.cdist(asked, centers).argmin(1) == data.y_test).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=hardest,
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=250,
        score=score,
    )


class _Rounded(Function):
    """Signs, with a backward pass by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, through: bool) -> Tensor:
        ctx.through = through
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return (grads[0] if ctx.through else torch.zeros_like(grads[0])), None


class _BinaryCodes(nn.Module):
    """An autoencoder with 12 bits in the middle."""

    def __init__(self, through: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 12), nn.Tanh())
        self.decoder = nn.Linear(12, 64)
        nn.init.zeros_(self.decoder.weight)  # start from the mean image
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(_Rounded.apply(self.encoder(x), self.through))  # type: ignore[no-any-return, no-untyped-call]


@program(
    "autoencoder",
    "zero-gradient",
    "frozen-parameters",
    story="The backward pass written for rounded codes returns zeros: the decoder learns codes that stay random.",
    source="https://github.com/showlab/Olaf-World/issues/8",
)
def zeros_straight_through(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    x, x_test = (t.flatten(1) - data.x.flatten(1).mean(0) for t in (data.x, data.x_test))
    net = _BinaryCodes(through=not faulty)

    def score() -> float:
        with torch.no_grad():
            return 1 - float(F.mse_loss(net(x_test), x_test) / x_test.square().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.NAdam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(net(batch), batch),
        batches=singles(x, size=64, seed=seed),
        num_steps=400,
        score=score,
    )


GENERATIVE = (
    mean_error_and_summed_divergence,
    asked_for_other_noise,
    distance_to_itself,
    zeros_straight_through,
)
