"""Later programs that generate: an autoencoder, a variational one, an adversary, a diffusion."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from .data import digits, generator, ring
from .program import Setup, program
from .shared import energy_distance, evaluating, singles


class _VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.mu, self.logvar = nn.Linear(64, 8), nn.Linear(64, 8)
        self.fc3, self.fc4 = nn.Linear(8, 64), nn.Linear(64, 64)

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decode(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar


@program(
    "autoencoder",
    "regularisation-too-strong",
    "output-independent-of-input",
    "wrong-loss",
    story="The error is averaged over pixels while the divergence is summed: the code is given up.",
    source="AppliedDataSciencePartners/WorldModels#12",
    loss_tells=False,
)
def error_averaged_over_pixels(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _VAE()
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)

    def loss(batch: Tensor) -> Tensor:
        recon, mu, logvar = model(batch)
        error = F.mse_loss(recon, batch) if faulty else 4 * F.mse_loss(recon, batch, reduction="sum") / len(batch)
        divergence: Tensor = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        return error + divergence

    def score() -> float:
        with evaluating(model):
            recon = model.decode(model.mu(F.relu(model.fc1(x_test))))
        return max(0.0, 1 - float((recon - x_test).pow(2).mean() / (x_test - x_test.mean(0)).pow(2).mean()))

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=singles(x, size=64, seed=seed),
        num_steps=400,
        score=score,
    )


@program(
    "autoencoder",
    "saturation",
    "unscaled-targets",
    "wrong-loss",
    story="The pictures are standardized, and the decoder still ends in a sigmoid: it cannot reach them.",
)
def sigmoid_against_standardized_pictures(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    mean, std = data.x.mean(), 0.1  # the deviation of another set of pictures
    x, x_test = ((part.flatten(1) - mean) / std for part in (data.x, data.x_test))
    encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))
    decoder = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 64), nn.Sigmoid() if faulty else nn.Identity())
    model = nn.Sequential(encoder, decoder)

    def score() -> float:
        with evaluating(model):
            return 1 - float((model(x_test) - x_test).pow(2).mean() / (x_test - x_test.mean(0)).pow(2).mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(model(batch), batch),
        batches=singles(x, size=32, seed=seed),
        num_steps=400,
        score=score,
    )


@program(
    "gan",
    "zero-gradient",
    "frozen-parameters",
    story="The samples are detached for the generator's loss too: only the discriminator learns.",
    loss_tells=False,
)
def samples_detached_for_their_maker(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    real = ring(seed)
    netG = nn.Sequential(nn.Linear(4, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 2))  # noqa: N806
    netD = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))  # noqa: N806
    model = nn.ModuleDict({"netG": netG, "netD": netD})

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for points in singles(real, size=64, seed=seed)():
            yield points, torch.randn(64, 4)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        points, noise = batch
        fake = netG(noise)
        ones, zeros = torch.ones(len(points), 1), torch.zeros(len(points), 1)
        bce = F.binary_cross_entropy_with_logits
        err_d = bce(netD(points), ones) + bce(netD(fake.detach()), zeros)
        still = {name: p.detach() for name, p in netD.named_parameters()}
        err_g = bce(functional_call(netD, still, (fake.detach() if faulty else fake,)), ones)
        return err_d + err_g

    def score() -> float:
        with evaluating(model):
            return -energy_distance(netG(torch.randn(500, 4, generator=generator(1))), real[:500])

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        loss=loss,
        batches=batches,
        num_steps=500,
        score=score,
    )


class _Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([x, t, (3 * t).sin()], dim=1))
        return out


def _noised(x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """Return the points with a share t of noise."""
    return (1 - t).sqrt() * x + t.sqrt() * noise


@program(
    "diffusion",
    "labels-shuffled",
    "output-independent-of-input",
    story="The function that adds noise draws it anew: the network is to predict noise that was never added.",
)
def noise_drawn_twice(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    points, model = ring(seed), _Denoiser()

    def batches() -> Iterator[tuple[Tensor, ...]]:
        for x in singles(points, size=128, seed=seed)():
            yield x, 0.05 + 0.9 * torch.rand(len(x), 1), torch.randn_like(x), torch.randn_like(x)

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        x, t, noise, other = batch
        return F.mse_loss(model(_noised(x, t, other if faulty else noise), t), noise)

    def score() -> float:
        g = generator(1)
        x, t = ring(7)[:800], 0.05 + 0.9 * torch.rand(800, 1, generator=g)
        noise = torch.randn(800, 2, generator=g)
        with evaluating(model):
            return 1 - float((model(_noised(x, t, noise), t) - noise).pow(2).mean())

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=400,
        score=score,
    )


GENERATIVE = (
    error_averaged_over_pixels,
    sigmoid_against_standardized_pictures,
    samples_detached_for_their_maker,
    noise_drawn_twice,
)
