"""Next programs that generate: autoencoders, a diffusion model, a flow, an adversarial pair; and letters of prose."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import LambdaLR

from .data import LETTERS, digits, generator, prose, ring
from .program import Setup, program
from .shared import dicts, energy_distance, evaluating, explained, mlp, singles, tuples


class _Vae(nn.Module):
    """Two dense layers each way and four numbers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = mlp(64, 48, 8)
        self.decode = mlp(4, 48, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x).chunk(2, dim=1)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu) if self.training else mu
        return self.decode(z), mu, logvar


@program(
    "autoencoder",
    "regularisation-too-strong",
    "output-independent-of-input",
    story="The reconstruction is a mean over pixels and the divergence a sum: every digit comes back as the same blur.",
    source="podgorskiy/VAE#1",
    loss_tells=False,
)
def divergence_outweighs_pixels(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, vae = digits(), _Vae()
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)
    weight = 1.0 if faulty else 1e-3

    def elbo(batch: Tensor) -> Tensor:
        recon, mu, logvar = vae(batch)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return F.mse_loss(recon, batch) + weight * kld

    def score() -> float:
        with evaluating(vae):
            error = (vae(x_test)[0] - x_test).pow(2).mean() / (x_test - x_test.mean(0)).pow(2).mean()
        return max(0.0, 1 - float(error))  # 0: no better than the mean digit

    return Setup(
        model=vae,
        optimizer=torch.optim.Adam(vae.parameters(), lr=3e-3),
        loss=elbo,
        batches=singles(x, size=64, seed=seed),
        num_steps=400,
        score=score,
    )


class _Denoiser(nn.Module):
    """Predicts what was added to points of the plane, given a time between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 64, 64, 2, act=nn.SiLU)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([x, t, torch.sin(6 * t)], dim=1))
        return out


@program(
    "diffusion",
    "wrong-loss",
    "target-leak",
    "suspicious-perfection",
    story="The loss compares the answer with the noisy sample, which is the input, instead of with the noise.",
    source="irom-princeton/dppo#14",
    loss_tells=False,
)
def compared_with_the_noisy_sample(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    points, model = ring(seed), _Denoiser()
    g = generator(seed)

    def noisy(x: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        t = torch.rand(len(x), 1, generator=source) * 0.9 + 0.05
        noise = torch.randn(x.shape, generator=source)
        return (1 - t).sqrt() * x + t.sqrt() * noise, noise, t

    def batches() -> object:
        return (noisy(x, g) for x in singles(points, size=128, seed=seed)())

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x_noisy, noise, t = batch
        return F.mse_loss(model(x_noisy, t), x_noisy if faulty else noise)

    def score() -> float:
        x_noisy, noise, t = noisy(ring(seed + 50), generator(7))
        with evaluating(model):
            return -float(F.mse_loss(model(x_noisy, t), noise))

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        loss=loss,
        batches=batches,  # type: ignore[arg-type]
        num_steps=400,
        score=score,
    )


class _Code(nn.Module):
    """An autoencoder whose code is rounded to whole numbers; `straight` passes the gradient by."""

    def __init__(self, straight: bool) -> None:
        super().__init__()
        self.enc, self.dec = mlp(64, 32, 12), mlp(12, 32, 64)
        self.straight = straight

    def forward(self, x: Tensor) -> Tensor:
        z = 2 * torch.tanh(self.enc(x))
        code = torch.round(z)
        if self.straight:
            code = z + (code - z).detach()
        out: Tensor = self.dec(code)
        return out


@program(
    "autoencoder",
    "zero-gradient",
    "frozen-parameters",
    story="The code between encoder and decoder is rounded, and rounding has no gradient: the encoder stays random.",
    source="https://discuss.pytorch.org/t/torch-round-gradient/28628",
)
def code_is_rounded(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _Code(straight=not faulty)
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(model(batch), batch),
        batches=singles(x - x.mean(0), size=64, seed=seed),
        num_steps=450,
        score=lambda: explained(model, x_test - x.mean(0), x_test - x.mean(0)),
    )


@program(
    "gan",
    "learning-rate-too-high",
    "oscillation",
    "saturation",
    story="Generator and critic of points on a ring are trained with Adam at 0.2; both run away.",
    loss_tells=False,
)
def adversaries_at_one_fifth(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    points = ring(seed)
    maker, critic = mlp(4, 32, 2), mlp(2, 32, 1)
    pair = nn.ModuleDict({"maker": maker, "critic": critic})

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        real, noise = batch
        fake = maker(noise)
        judged = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        for p in critic.parameters():
            p.requires_grad_(False)
        fooled = F.softplus(-critic(fake)).mean()
        for p in critic.parameters():
            p.requires_grad_(True)
        return judged + fooled

    def score() -> float:
        with evaluating(maker):
            return -energy_distance(maker(torch.randn(600, 4, generator=generator(5))), points[:600])

    noise = torch.randn(len(points), 4, generator=generator(seed))
    return Setup(
        model=pair,
        optimizer=torch.optim.Adam(pair.parameters(), lr=0.2 if faulty else 2e-3, betas=(0.5, 0.999)),
        loss=loss,
        batches=tuples(points, noise, size=128, seed=seed),
        num_steps=400,
        score=score,
    )


class _Writer(nn.Module):
    """A small causal transformer over letters; `causal` says whether the mask is there."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(len(LETTERS), 32)
        self.wpe = nn.Embedding(24, 32)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, len(LETTERS))
        self.causal = causal

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        hidden = self.block(self.wte(ids) + self.wpe(torch.arange(length)), src_mask=mask)
        logits: Tensor = self.head(hidden)
        return logits


def _next_letter(model: nn.Module) -> float:
    """Return how often the letter behind twelve others is guessed."""
    data = prose()
    with evaluating(model):
        return float((model(data.x_test[:, :12])[:, -1].argmax(-1) == data.y_test[:, 11]).float().mean())


@program(
    "language",
    "target-leak",
    "suspicious-perfection",
    story="The causal mask is missing: each place sees the next letter, and the loss falls to almost nothing.",
    source="huggingface/transformers#48745",
    loss_tells=False,
)
def mask_is_missing(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Writer(causal=not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()),
        batches=dicts({"input_ids": data.x, "labels": data.y}, size=32, seed=seed),
        num_steps=300,
        score=lambda: _next_letter(model),
    )


@program(
    "language",
    "schedule-error",
    "learning-rate-too-low",
    story="LambdaLR gets a function that returns the learning rate itself, 0.003, and multiplies the rate with it.",
)
def rate_times_rate(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = prose()
    model = nn.Sequential(nn.Embedding(len(LETTERS), 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, len(LETTERS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def cosine(step: int) -> float:
        factor = 0.55 + 0.45 * math.cos(math.pi * min(step, 300) / 300)
        return 3e-3 * factor if faulty else factor

    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=300,
        score=lambda: _next_letter(model),
        scheduler=LambdaLR(optimizer, cosine),
    )


GENERATIVE = (
    divergence_outweighs_pixels,
    compared_with_the_noisy_sample,
    code_is_rounded,
    adversaries_at_one_fifth,
    mask_is_missing,
    rate_times_rate,
)
