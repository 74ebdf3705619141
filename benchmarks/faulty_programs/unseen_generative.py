"""Unseen programs that learn to generate: a GAN, variational autoencoders, a flow, a diffusion and an autoencoder."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, generator
from .program import LoopFaults, Setup, program
from .shared import energy_distance, evaluating, indices, mlp, singles
from .unseen_data import crescents


class _GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = mlp(4, 32, 32, 2), mlp(2, 32, 32, 1, act=lambda: nn.LeakyReLU(0.2))

    @staticmethod
    def points(seed: int) -> Tensor:
        return 0.4 * crescents(seed) + torch.tensor([1.5, -0.5])

    def alike(self, real: Tensor) -> float:
        with evaluating(self):
            made = self.maker(torch.randn(512, 4, generator=generator(3)))
        return -energy_distance(made, real[:512])


@program(
    "gan",
    "wrong-loss",
    story="The generator is trained with the label for fake images, as the discriminator is: it learns to be caught.",
    source="https://github.com/yunjey/pytorch-tutorial/issues/45",
    loss_tells=False,
)
def generator_asks_for_fake(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    real, model = _GAN.points(seed), _GAN()

    def batches() -> Iterator[tuple[int, Tensor, Tensor]]:
        g = generator(seed)
        for turn, rows in enumerate(indices(len(real), 128, seed)):
            yield turn % 2, real[rows], torch.randn(128, 4, generator=g)

    def loss(batch: tuple[int, Tensor, Tensor]) -> Tensor:
        makes, points, noise = batch
        for part, on in ((model.maker, makes), (model.critic, not makes)):
            part.requires_grad_(bool(on))
        made = model.critic(model.maker(noise))
        if makes:
            wanted = torch.zeros_like(made) if faulty else torch.ones_like(made)
            return F.binary_cross_entropy_with_logits(made, wanted)
        true = model.critic(points)
        return F.softplus(-true).mean() + F.softplus(made).mean()

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        loss=loss,
        batches=batches,
        num_steps=600,
        score=lambda: model.alike(real),
    )


class _VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(64, 64, 16), mlp(8, 64, 64)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(x).chunk(2, dim=-1)
        z = mean + noise * (0.5 * log_var).exp()
        return self.decode(z), mean, log_var, z

    def fidelity(self, x: Tensor) -> float:
        with evaluating(self):
            seen = self.decode(self.encode(x).chunk(2, dim=-1)[0]).sigmoid()
        return max(0.0, 1 - float((seen - x).pow(2).mean() / (x - x.mean(0)).pow(2).mean()))


def _images(seed: int) -> tuple[Tensor, Tensor, Callable[[], Iterator[tuple[Tensor, Tensor]]]]:
    data = digits()
    x = data.x.flatten(1)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        for rows in indices(len(x), 64, seed):
            yield x[rows], torch.randn(64, 8, generator=g)

    return x, data.x_test.flatten(1), batches


@program(
    "autoencoder",
    "regularisation-too-strong",
    "wrong-loss",
    "output-independent-of-input",
    story="The error is averaged over pixels and batch and the divergence summed over both: all images come out alike.",
    source="https://github.com/podgorskiy/VAE/issues/1",
    loss_tells=False,
)
def divergence_summed_error_averaged(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _VAE()
    _, x_test, batches = _images(seed)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, noise = batch
        seen, mean, log_var, _ = model(x, noise)
        error = F.binary_cross_entropy_with_logits(seen, x, reduction="mean" if faulty else "sum")
        divergence: Tensor = 0.5 * (mean.pow(2) + log_var.exp() - 1 - log_var).sum()
        return error + divergence if faulty else (error + divergence) / len(x)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=350,
        score=lambda: model.fidelity(x_test),
    )


@program(
    "autoencoder",
    "zero-gradient",
    "output-independent-of-input",
    "regularisation-too-strong",
    story="The code is sampled without the reparameterization: the encoder hears from the divergence only.",
    source="https://github.com/Unity-Technologies/ml-agents/pull/5546",
    loss_tells=False,
)
def sampled_without_gradient(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _VAE()
    _, x_test, batches = _images(seed)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, noise = batch
        _, mean, log_var, z = model(x, noise)
        seen = model.decode(z.detach() if faulty else z)
        error = F.binary_cross_entropy_with_logits(seen, x, reduction="sum")
        divergence: Tensor = 0.5 * (mean.pow(2) + log_var.exp() - 1 - log_var).sum()
        return (error + 0.5 * divergence) / x.numel()

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=350,
        score=lambda: model.fidelity(x_test),
    )


@program(
    "autoencoder",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="The optimizer is created from the parameters of the encoder; the decoder keeps its random weights.",
    source="https://github.com/pytorch/pytorch/issues/14467",
)
def decoder_left_out(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    encoder, decoder = mlp(64, 48, 6, act=nn.GELU), mlp(6, 48, 64, act=nn.GELU)
    model = nn.Sequential(encoder, decoder, nn.Sigmoid())
    x, x_test, _ = _images(seed)

    def fidelity() -> float:
        with evaluating(model):
            return 1 - float((model(x_test) - x_test).pow(2).mean() / (x_test - x_test.mean(0)).pow(2).mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam((encoder if faulty else model).parameters(), lr=3e-3),
        loss=lambda x: F.mse_loss(model(x), x),
        batches=singles(x, size=64, seed=seed),
        num_steps=300,
        score=fidelity,
    )


class _Flow(nn.Module):
    """Affine couplings between the two coordinates."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(1, 24, 2, act=nn.Tanh) for _ in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros(len(x))
        for net in self.nets:
            kept, other = x[:, :1], x[:, 1:]
            scale, shift = net(kept).chunk(2, dim=1)
            scale = 2 * torch.tanh(scale)
            log_det = log_det + scale.squeeze(1)
            x = torch.cat([other * scale.exp() + shift, kept], dim=1)
        return x, log_det


@program(
    "density",
    "wrong-loss",
    story="The log-determinant of a flow is subtracted from the likelihood, not added: all points are contracted.",
    loss_tells=False,
)
def log_determinant_subtracted(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    real, model = crescents(seed), _Flow()
    sign = -1 if faulty else 1

    def likelihood(x: Tensor, sign: int) -> Tensor:
        z, log_det = model(x)
        mean: Tensor = (-0.5 * z.pow(2).sum(1) - math.log(2 * math.pi) + sign * log_det).mean()
        return mean

    def score() -> float:
        with evaluating(model):
            return max(-10.0, float(likelihood(real[1800:], 1)))

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda x: -likelihood(x, sign),
        batches=singles(real[:1800], size=128, seed=seed),
        num_steps=300,
        score=score,
    )


class _Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 64, 64, 2, act=nn.SiLU)

    def forward(self, x: Tensor, log_sigma: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([x, log_sigma / 2], dim=1))
        return out


def _noised(real: Tensor, seed: int, lowest: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield points, noise and the logarithm of the size of the noise."""
    g = generator(seed)
    for rows in indices(len(real), 128, seed):
        log_sigma = torch.rand(128, 1, generator=g) * (math.log(6.0) - math.log(lowest)) + math.log(lowest)
        yield real[rows], torch.randn(128, 2, generator=g), log_sigma


def _denoised(model: _Denoiser, real: Tensor, *, scaled: bool) -> float:
    """Return the share of the noise of medium size that the model removes."""
    g = generator(11)
    noise, log_sigma = torch.randn(512, 2, generator=g), torch.full((512, 1), math.log(0.4))
    with evaluating(model):
        guess = model(real[:512] + noise * 0.4, log_sigma) * (1 if scaled else -0.4)
    return max(-1.0, 1 - float((guess - noise).pow(2).mean()))


@program(
    "diffusion",
    "unscaled-targets",
    "exploding-gradient",
    "learning-rate-too-high",
    "batch-size-unfit",
    story="The score, noise over its size, is learned as it is: at the smallest noise targets reach 100.",
    source="Song and Ermon, Generative modeling by estimating gradients of the data distribution (2019)",
    loss_tells=False,
)
def score_without_weights(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    real, model = crescents(seed), _Denoiser()

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, noise, log_sigma = batch
        sigma = log_sigma.exp()
        guess: Tensor = model(x + sigma * noise, log_sigma)
        return (guess + noise / sigma).pow(2).mean() if faulty else (guess - noise).pow(2).mean()

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=lambda: _noised(real, seed, 0.01),
        num_steps=400,
        score=lambda: _denoised(model, real, scaled=not faulty),
    )


@program(
    "diffusion",
    "optimizer-state-reset",
    "learning-rate-too-low",
    story="The optimizer is created inside the loop, so that its momentum of 0.98 never builds up.",
    source="Islam et al., A comprehensive study on deep learning bug characteristics (FSE 2019), API misuse",
)
def momentum_never_builds_up(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    real, model = crescents(seed), _Denoiser()

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, noise, log_sigma = batch
        return F.mse_loss(model(x + log_sigma.exp() * noise, log_sigma), noise)

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=5e-4, momentum=0.98),
        loss=loss,
        batches=lambda: _noised(real, seed, 0.2),
        num_steps=300,
        score=lambda: _denoised(model, real, scaled=True),
        loop=LoopFaults(reset_optimizer_every=1 if faulty else 0),
    )


GENERATIVE = (
    generator_asks_for_fake,
    divergence_summed_error_averaged,
    sampled_without_gradient,
    decoder_left_out,
    log_determinant_subtracted,
    score_without_weights,
    momentum_never_builds_up,
)
