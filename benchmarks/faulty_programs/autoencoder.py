"""Autoencoders of digits, plain and variational."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, generator
from .program import Setup, program
from .shared import explained, indices, mlp, singles


def pixels() -> tuple[Tensor, Tensor]:
    """Return training and held-out images as rows, less the mean image and of deviation 1."""
    data = digits()
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)
    mean = x.mean(0)
    return (x - mean) / (x - mean).std(), (x_test - mean) / (x - mean).std()


class _Variational(nn.Module):
    """`forward` decodes the mean of the code, `parts` a sample of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 48, 16), mlp(8, 48, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x)[:, :8])
        return out

    def parts(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + (spread / 2).exp() * noise), mean, spread


@program(
    "autoencoder",
    "regularisation-too-strong",
    "output-independent-of-input",
    story="The reconstruction error is averaged over pixels, the KL term is summed: the code collapses to the prior.",
    source="https://github.com/AppliedDataSciencePartners/WorldModels/issues/12",
    loss_tells=False,
)
def code_collapses(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (x, x_test), model = pixels(), _Variational()

    def batches() -> Iterator[dict[str, Tensor]]:
        g = generator(seed)
        for rows in indices(len(x), 64, seed):
            yield {"x": x[rows], "noise": torch.randn(64, 8, generator=g)}

    def loss(batch: dict[str, Tensor]) -> Tensor:
        again, mean, spread = model.parts(batch["x"], batch["noise"])
        kl = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(1).mean()
        return (again - batch["x"]).pow(2).mean() + (1.0 if faulty else 1 / 640) * kl

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=400,
        score=lambda: explained(model, x_test, x_test),
    )


@program(
    "autoencoder",
    "dead-units",
    "learning-rate-too-high",
    story="SGD with momentum at a rate of 2 throws most ReLU units of the bottleneck below zero, where they stay.",
    source="https://github.com/dangitstam/topic-rnn/pull/9",
)
def units_killed_by_the_rate(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (x, x_test), model = pixels(), nn.Sequential(mlp(64, 48, 12), nn.ReLU(), mlp(12, 48, 64))
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=2.0 if faulty else 0.3, momentum=0.9),
        loss=lambda batch: F.mse_loss(model(batch), batch),
        batches=singles(x, size=64, seed=seed),
        num_steps=400,
        score=lambda: explained(model, x_test, x_test),
    )


class _Mixing(nn.Module):
    def __init__(self, mixing: bool) -> None:
        super().__init__()
        self.net, self.mixing = mlp(64, 32, 12, 32, 64), mixing

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(64, -1).T if self.mixing else x
        out: Tensor = self.net(x)
        return out


@program(
    "autoencoder",
    "batch-dependence",
    "labels-shuffled",
    story="A channels-first habit: the batch is reshaped to (pixels, batch) and transposed, which scatters every image "
    "over the batch.",
)
def images_scattered(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (x, x_test), model = pixels(), _Mixing(mixing=faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(model(batch), batch),
        batches=singles(x, size=50, seed=seed),
        num_steps=300,
        score=lambda: explained(model, x_test, x_test),
    )


@program(
    "autoencoder",
    "saturation",
    "poor-initialisation",
    "vanishing-gradient",
    story="All weights of a deep tanh network are drawn from a normal distribution of deviation 1: every unit is at "
    "+1 or -1.",
    source="Glorot and Bengio, Understanding the difficulty of training deep feedforward neural networks, 2010",
    same_start=False,
)
def weights_of_deviation_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (x, x_test), model = pixels(), mlp(64, 64, 48, 64, 64, act=nn.Tanh)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=1.0 if faulty else parameter.shape[1] ** -0.5)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        loss=lambda batch: F.mse_loss(model(batch), batch),
        batches=singles(x, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(model, x_test, x_test),
    )


AUTOENCODER = (code_collapses, units_killed_by_the_rate, images_scattered, weights_of_deviation_one)
