"""Generative adversarial networks on a ring of eight clusters.

Generator and discriminator are updated together: the generator's loss goes through a copy of the discriminator's
weights without gradient, so one backward pass and one optimizer with two groups serve both.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from .data import generator, ring
from .program import Setup, program
from .shared import energy_distance, evaluating, indices, mlp


class Gan(nn.Module):
    """A generator of points, and a judge that tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = mlp(4, 64, 64, 2), mlp(2, 64, 64, 1, act=nn.SiLU)

    def frozen_judge(self, points: Tensor) -> Tensor:
        """Return the judge's logits without gradient for its weights."""
        weights = {name: value.detach() for name, value in self.judge.named_parameters()}
        out: Tensor = functional_call(self.judge, weights, (points,))
        return out

    def loss(self, real: Tensor, noise: Tensor, *, cut: bool = False, saturating: bool = False) -> Tensor:
        """Return the sum of both players' losses."""
        fake: Tensor = self.generator(noise)
        judged = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake.detach())).mean()
        opinion = self.frozen_judge(fake.detach() if cut else fake)
        fooled = -F.softplus(opinion).mean() if saturating else F.softplus(-opinion).mean()
        return judged + fooled


def likeness(model: Gan, points: Tensor) -> float:
    """Return minus the energy distance of 512 generated points to the given ones."""
    noise = torch.randn(512, 4, generator=generator(99))
    with evaluating(model):
        return -energy_distance(model.generator(noise), points[:512])


def gan_batches(points: Tensor, seed: int, *, constant_noise: bool = False) -> Iterator[dict[str, Tensor]]:
    g = generator(seed)
    for rows in indices(len(points), 64, seed):
        noise = torch.zeros(64, 4) if constant_noise else torch.randn(64, 4, generator=g)
        yield {"real": points[rows], "noise": noise}


def groups(model: Gan, generator_rate: float, judge_rate: float) -> list[dict[str, object]]:
    return [
        {"params": list(model.generator.parameters()), "lr": generator_rate},
        {"params": list(model.judge.parameters()), "lr": judge_rate},
    ]


@program(
    "gan",
    "learning-rate-too-high",
    "saturation",
    "vanishing-gradient",
    story="The discriminator's rate is 300 times the generator's and it wins; the generator's saturating loss is flat.",
    source="https://github.com/simontomaskarlsson/GAN-MRI/issues/11",
    loss_tells=False,
)
def judge_too_strong(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    points, model = ring(seed), Gan()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(groups(model, 1e-3, 0.3 if faulty else 3e-3), betas=(0.5, 0.9)),
        loss=lambda batch: model.loss(batch["real"], batch["noise"], saturating=True),
        batches=lambda: gan_batches(points, seed),
        num_steps=400,
        score=lambda: likeness(model, ring(seed + 1000)),
    )


@program(
    "gan",
    "zero-gradient",
    "frozen-parameters",
    story="The generated points are detached in the generator's loss too, so the generator never gets a gradient.",
    source="https://github.com/wangle53/CSA-CDGAN/issues/5",
    loss_tells=False,
)
def generator_detached(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    points, model = ring(seed), Gan()
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(groups(model, 1e-3, 2e-3)),
        loss=lambda batch: model.loss(batch["real"], batch["noise"], cut=faulty),
        batches=lambda: gan_batches(points, seed),
        num_steps=400,
        score=lambda: likeness(model, ring(seed + 1000)),
    )


@program(
    "gan",
    "constant-inputs",
    "output-independent-of-input",
    story="torch.zeros is written where torch.randn was meant: the generator always gets the same noise.",
    loss_tells=False,
)
def noise_without_noise(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    points, model = ring(seed), Gan()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(groups(model, 1e-3, 2e-3), betas=(0.5, 0.9)),
        loss=lambda batch: model.loss(batch["real"], batch["noise"]),
        batches=lambda: gan_batches(points, seed, constant_noise=faulty),
        num_steps=400,
        score=lambda: likeness(model, ring(seed + 1000)),
    )


@program(
    "gan",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="Both groups of the optimizer are built from copies: the generator's group holds another generator.",
    loss_tells=False,
)
def group_of_another_generator(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    points, model, other = ring(seed), Gan(), Gan()
    trained = groups(model, 1e-3, 1e-3)
    if faulty:
        trained[0] = groups(other, 1e-3, 1e-3)[0]
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(trained, betas=(0.5, 0.9), weight_decay=0.0),
        loss=lambda batch: model.loss(batch["real"], batch["noise"]),
        batches=lambda: gan_batches(points, seed),
        num_steps=400,
        score=lambda: likeness(model, ring(seed + 1000)),
    )


GAN = (judge_too_strong, generator_detached, noise_without_noise, group_of_another_generator)
