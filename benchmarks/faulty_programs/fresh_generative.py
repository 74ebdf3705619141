"""Fresh programs that generate: autoencoders with codes, a game of two networks, fields in half precision."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

from .data import digits, generator, ring
from .fresh_data import speakers
from .program import LoopFaults, Setup, program
from .shared import energy_distance, evaluating, explained, mlp, singles, tuples


class _Codes(nn.Module):
    """An autoencoder that replaces each of four code vectors by the nearest of 24."""

    def __init__(self, *, straight: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 48, 16), mlp(16, 48, 64)
        self.book = nn.Parameter(0.5 * torch.randn(24, 4))
        self.straight = straight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x).tanh().view(len(x), 4, 4)
        picked = self.book[torch.cdist(code, self.book.expand(len(x), -1, -1)).argmin(-1)]
        gap = F.mse_loss(picked, code.detach())
        used = code + (picked - code).detach() if self.straight else picked
        return self.decoder(used.flatten(1)), gap


@program(
    "autoencoder",
    "zero-gradient",
    "frozen-parameters",
    story="The decoder gets the picked codes themselves, without the straight-through step: the encoder never learns.",
    source="Biohub/esm#92",
    loss_tells=False,
)
def codes_without_a_way_back(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _Codes(straight=not faulty)
    x, held = data.x.flatten(1), data.x_test.flatten(1)

    def loss(batch: Tensor) -> Tensor:
        again, gap = model(batch)
        total: Tensor = F.mse_loss(again, batch) * 10 + gap
        return total

    def score() -> float:
        with evaluating(model):
            error = (model(held)[0] - held).pow(2).mean() / (held - x.mean(0)).pow(2).mean()
        return max(0.0, 1 - float(error))

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=singles(x, size=64, seed=seed),
        num_steps=400,
        score=score,
    )


class _Gauss(nn.Module):
    """A variational autoencoder of digits with eight latent numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 48, 16), mlp(8, 48, 64)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + (0.5 * log_variance).exp() * noise), mean, log_variance


def _sampled_well(model: _Gauss) -> float:
    """Return minus the energy distance between decoded noise and held-out digits."""
    held = digits().x_test.flatten(1)[:300]
    with evaluating(model):
        made = model.decoder(torch.randn(300, 8, generator=generator(3))).sigmoid()
    return -energy_distance(made, held)


@program(
    "autoencoder",
    "wrong-loss",
    "exploding-gradient",
    story="The divergence from the prior has the wrong sign: the further the codes run away, the lower the loss.",
    source="FluxML/model-zoo#147",
    loss_tells=False,
)
def rewarded_for_divergence(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _Gauss()
    sign = -1 if faulty else 1

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed + 1)
        for x in singles(data.x.flatten(1), size=64, seed=seed)():
            yield x, torch.randn(64, 8, generator=g)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        again, mean, log_variance = model(*batch)
        error = F.binary_cross_entropy_with_logits(again, batch[0], reduction="sum") / 64
        apart = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum() / 64
        total: Tensor = error + sign * apart
        return total

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=300,
        score=lambda: _sampled_well(model),
    )


@program(
    "autoencoder",
    "missing-zero-grad",
    "exploding-gradient",
    story="zero_grad is called once, before the first epoch; every step follows the sum of all gradients.",
)
def zeroed_before_the_loop(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = speakers(seed)
    model = nn.Sequential(mlp(24, 32, 4, act=nn.ELU), mlp(4, 32, 24, act=nn.ELU))
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        loss=lambda batch: F.mse_loss(model(batch), batch),
        batches=singles(data.x, size=32, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, data.x_test),
        loop=LoopFaults(zero_grad_every=0 if faulty else 1),
    )


class _Game(nn.Module):
    """Generator and discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = mlp(4, 48, 48, 2), mlp(2, 48, 48, 1, act=lambda: nn.LeakyReLU(0.2))


def _points(seed: int, size: int = 128) -> Iterator[tuple[Tensor, Tensor]]:
    g = generator(seed + 5)
    for real in singles(ring(seed), size=size, seed=seed)():
        yield real, torch.randn(size, 4, generator=g)


def _circle(game: _Game) -> float:
    with evaluating(game):
        return -energy_distance(game.make(torch.randn(400, 4, generator=generator(2))), ring(77)[:400])


def _verdict(game: _Game, real: Tensor, noise: Tensor, factor: float) -> Tensor:
    """Return the loss of the discriminator, with a penalty on its gradient at real points."""
    real = real.clone().requires_grad_()
    at_real = game.judge(real)
    slope = torch.autograd.grad(at_real.sum(), real, create_graph=True)[0]
    wrong = F.softplus(-at_real).mean() + F.softplus(game.judge(game.make(noise).detach())).mean()
    loss: Tensor = wrong + 0.5 * factor * slope.pow(2).sum(1).mean()
    return loss


@program(
    "gan",
    "frozen-parameters",
    "zero-gradient",
    story="The discriminator is frozen while the generator is updated, and nobody sets requires_grad back.",
    source="0b01/SimGAN-Captcha#1",
    loss_tells=False,
)
def judge_stays_frozen(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    game = _Game()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        judged = _verdict(game, *batch, 0.1)
        game.judge.requires_grad_(False)
        made = F.softplus(-game.judge(game.make(batch[1]))).mean()
        if not faulty:
            game.judge.requires_grad_(True)
        return judged + made

    return Setup(
        model=game,
        optimizer=torch.optim.RMSprop(game.parameters(), lr=1e-3),
        loss=loss,
        batches=lambda: _points(seed),
        num_steps=400,
        score=lambda: _circle(game),
    )


@program(
    "gan",
    "regularisation-too-strong",
    "vanishing-gradient",
    story="The penalty on the gradient of the discriminator has a factor of 2,000: it stays flat and says nothing.",
    loss_tells=False,
)
def gradient_penalty_of_two_thousand(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    game = _Game()
    factor = 2000.0 if faulty else 0.1

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        judged = _verdict(game, *batch, factor)
        game.judge.requires_grad_(False)
        made = F.softplus(-game.judge(game.make(batch[1]))).mean()
        game.judge.requires_grad_(True)
        return judged + made

    return Setup(
        model=game,
        optimizer=torch.optim.RMSprop(game.parameters(), lr=1e-3),
        loss=loss,
        batches=lambda: _points(seed),
        num_steps=500,
        score=lambda: _circle(game),
    )


@program(
    "autoencoder",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="weight_norm is applied after the optimizer was made: it holds the old weights, the layers have new ones.",
)
def weights_normalized_too_late(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = speakers(seed), nn.Sequential(mlp(24, 32, 4, act=nn.ELU), mlp(4, 32, 24, act=nn.ELU))

    def normalize() -> None:
        for module in list(model.modules()):
            if isinstance(module, nn.Linear):
                parametrizations.weight_norm(module)

    if not faulty:
        normalize()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    if faulty:
        normalize()
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.mse_loss(model(batch), batch),
        batches=singles(data.x, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.x_test),
    )


@program(
    "field",
    "precision",
    "zero-gradient",
    "unscaled-targets",
    story="Displacements of some tenths of a millimeter, in meters, are learned in float16 without scaling the loss.",
    source="PyTorch documentation, torch.amp: gradient scaling (small gradients underflow in float16)",
    loss_tells=False,
)
def no_scaler_for_the_loss(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = mlp(2, 64, 64, 2, act=nn.Tanh)
    x = torch.rand(1500, 2, generator=generator(seed)) * 2 - 1
    y = 3e-4 * torch.stack([torch.sin(math.pi * x[:, 1]), x[:, 0] * x[:, 1]], dim=1)
    scale = 1.0 if faulty else 2.0**20

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            millimeters = model(batch[0])
        return scale * F.mse_loss(1e-3 * millimeters.float(), batch[1])

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-12),
        loss=loss,
        batches=tuples(x[:1200], y[:1200], size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(model, x[1200:], 1e3 * y[1200:]),
    )


GENERATIVE = (
    codes_without_a_way_back,
    rewarded_for_divergence,
    zeroed_before_the_loop,
    judge_stays_frozen,
    gradient_penalty_of_two_thousand,
    weights_normalized_too_late,
    no_scaler_for_the_loss,
)
