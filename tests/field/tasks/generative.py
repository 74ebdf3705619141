"""Generative and self-supervised tasks: a VAE with a summed loss, diffusion, contrastive pairs, a GAN."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.field.tasks.supervised import digits
from tests.field.tasks.task import Batch, Player, Task, fixed


class Vae(Task):
    """Digits through four latent numbers. The loss is a sum over pixels and samples, as in PyTorch's example."""

    name = "vae"
    labels = None
    sgd_mult = 1e-3

    def build(self) -> None:
        self.images = digits()[0].flatten(1)
        self.model = nn.ModuleDict(
            {
                "encoder": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)),
                "decoder": nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64)),
            }
        )

    def batch(self) -> Batch:
        return (self.images[torch.randint(0, 1400, (32,), generator=self.rng)],)

    def loss(self, batch: Batch) -> Tensor:
        return self._elbo(batch[0], lambda like: torch.randn_like(like))

    def _elbo(self, images: Tensor, draw) -> Tensor:
        mean, log_var = self.model["encoder"](images).chunk(2, 1)
        pixels = self.model["decoder"](mean + draw(mean) * (0.5 * log_var).exp())
        kl = -0.5 * (1.0 + log_var - mean.square() - log_var.exp()).sum()
        return functional.binary_cross_entropy_with_logits(pixels, images.clamp(0.0, 1.0), reduction="sum") + kl

    def score(self) -> Tensor:
        return self._elbo(self.images[1400:], lambda like: torch.randn(like.shape, generator=fixed(11))) / 397


class Diffusion(Task):
    """Noise prediction on a spiral in the plane; time and noise are drawn inside the loss."""

    name = "diffusion"
    labels = None

    def build(self) -> None:
        self.model = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
        rng = fixed(12)
        self.val = (
            self._points(2000, rng),
            torch.rand(2000, generator=rng),
            torch.randn(2000, 2, generator=rng),
        )

    def _points(self, count: int, rng: torch.Generator) -> Tensor:
        turn = 3.0 * math.pi * torch.rand(count, generator=rng).sqrt()
        return torch.stack([turn * turn.cos(), turn * turn.sin()], 1) / 5.0

    def batch(self) -> Batch:
        return (self._points(64, self.rng),)

    def loss(self, batch: Batch) -> Tensor:
        points = batch[0]
        return self._error(points, torch.rand(len(points)), torch.randn_like(points))

    def _error(self, points: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        keep = torch.cos(0.5 * math.pi * time)[:, None]
        noisy = keep * points + (1.0 - keep.square()).sqrt() * noise
        waves = time[:, None] * torch.tensor([1.0, 2.0, 4.0, 8.0])
        return functional.mse_loss(self.model(torch.cat([noisy, waves.sin(), waves.cos()], 1)), noise)

    def score(self) -> Tensor:
        return self._error(*self.val)


class Contrastive(Task):
    """Two views of one hidden vector find each other among 64 (InfoNCE, temperature 0.1)."""

    name = "contrastive"

    def build(self) -> None:
        self.views = 0.5 * torch.randn(2, 4, 20, generator=fixed(13))
        self.val = self._pairs(256, fixed(14))
        self.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))

    def _pairs(self, count: int, rng: torch.Generator) -> Batch:
        hidden = torch.randn(count, 4, generator=rng)
        left, right = (hidden @ view + 0.3 * torch.randn(count, 20, generator=rng) for view in self.views)
        return left, right

    def batch(self) -> Batch:
        return self._pairs(64, self.rng)

    def loss(self, batch: Batch) -> Tensor:
        left, right = (functional.normalize(self.model(view), dim=1) for view in batch)
        return functional.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))

    def score(self) -> Tensor:
        return torch.stack([self.loss((a, b)) for a, b in zip(*(v.split(64) for v in self.val), strict=True)]).mean()


class Gan(Task):
    """Eight Gaussians on a ring: a generator and a discriminator, an optimizer each."""

    name = "gan"
    learning_judged = False
    interactive = True
    labels = None
    beta1 = 0.5
    unsuited = ("sgd-momentum", "nesterov", "signsgd", "lion")
    latents: ClassVar[int] = 4

    def build(self) -> None:
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(
            nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
        )
        self.real = self._points(500, fixed(15))

    def _points(self, count: int, rng: torch.Generator) -> Tensor:
        angle = torch.randint(0, 8, (count,), generator=rng) * (math.pi / 4)
        return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2, generator=rng)

    @property
    def players(self) -> tuple[Player, ...]:
        return (
            Player(model=self.critic, batch=self._real_and_latents, loss=self._tell_apart),
            Player(model=self.generator, batch=self._latents, loss=self._deceive),
        )

    def _latents(self) -> Batch:
        return (torch.randn(64, self.latents, generator=self.rng),)

    def _real_and_latents(self) -> Batch:
        return self._points(64, self.rng), *self._latents()

    def _told_apart(self, points: Tensor) -> Tensor:
        """The critic's logits, of points with noise on them: a GAN without any runs in circles (Arjovsky 2017)."""
        return self.critic(points + 0.3 * torch.randn_like(points))

    def _tell_apart(self, batch: Batch) -> Tensor:
        real, latents = batch
        false = self._told_apart(self.generator(latents).detach())
        return functional.softplus(-self._told_apart(real)).mean() + functional.softplus(false).mean()

    def _deceive(self, batch: Batch) -> Tensor:
        return functional.softplus(-self._told_apart(self.generator(batch[0]))).mean()

    def score(self) -> Tensor:
        """The energy distance between generated and real points."""
        made = self.generator(torch.randn(500, self.latents, generator=fixed(16)))
        apart = [torch.cdist(a, b).mean() for a, b in ((made, self.real), (made, made), (self.real, self.real))]
        return 2.0 * apart[0] - apart[1] - apart[2]
