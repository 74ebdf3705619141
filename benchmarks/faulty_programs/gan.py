"""Generative adversarial networks on a ring of eight clusters.

Generator and discriminator are updated together: the generator's loss goes through a copy of the discriminator's
weights without gradient, so one backward pass and one optimizer with two groups serve both.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.faulty_programs.data import generator, ring
from benchmarks.faulty_programs.program import Setup, program
from benchmarks.faulty_programs.shared import energy_distance, evaluating, indices, mlp


class _Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = mlp(4, 64, 64, 2), mlp(2, 64, 64, 1, act=nn.SiLU)

    def frozen_judge(self, points: Tensor) -> Tensor:
        weights = {name: value.detach() for name, value in self.judge.named_parameters()}
        points = functional_call(self.judge, weights, (points,))
        return points

    def loss(self, real: Tensor, noise: Tensor, *, cut: bool = False, saturating: bool = False) -> Tensor:
        fake: Tensor = self.generator(noise)
        judged = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake.detach())).mean()
        opinion = self.frozen_judge(fake.detach() if cut else fake)
        fooled = -F.softplus(opinion).mean() if saturating else F.softplus(-opinion).mean()
        return judged + fooled


def _score(model: _Gan, points: Tensor) -> float:
    noise = torch.randn(512, 4, generator=generator(99))
    with evaluating(model):
        return -energy_distance(model.generator(noise), points[:512])


def _batches(points: Tensor, seed: int, *, constant_noise: bool = False) -> Iterator[dict[str, Tensor]]:
    g = generator(seed)
    for rows in indices(len(points), 64, seed):
        noise = torch.zeros(64, 4) if constant_noise else torch.randn(64, 4, generator=g)
        yield {"real": points[rows], "noise": noise}


def _groups(model: _Gan, generator_rate: float, judge_rate: float) -> list[dict[str, object]]:
    return [
        {"params": list(model.generator.parameters()), "lr": generator_rate},
        {"params": list(model.judge.parameters()), "lr": judge_rate},
    ]


@program(
    "gan",
    "learning-rate-too-high",
    "saturation",
    "vanishing-gradient",
    story="The discriminator learns a hundred times faster than the generator and wins; the generator's saturating "
    "loss is flat.",
    source="https://github.com/simontomaskarlsson/GAN-MRI/issues/11",
    loss_tells=False,
)
def judge_too_strong(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    points, model = ring(seed), _Gan()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(_groups(model, 1e-3, 1e-1 if faulty else 1e-3), betas=(0.5, 0.9)),
        loss=lambda batch: model.loss(batch["real"], batch["noise"], saturating=True),
        batches=lambda: _batches(points, seed),
        num_steps=400,
        score=lambda: _score(model, ring(seed + 1000)),
    )


@program(
    "gan",
    "zero-gradient",
    "frozen-parameters",
    story="The generated points are detached in the generator's loss too, so the generator never gets a gradient.",
    loss_tells=False,
)
def generator_detached(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    points, model = ring(seed), _Gan()
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(_groups(model, 1e-3, 1e-3)),
        loss=lambda batch: model.loss(batch["real"], batch["noise"], cut=faulty),
        batches=lambda: _batches(points, seed),
        num_steps=400,
        score=lambda: _score(model, ring(seed + 1000)),
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
    points, model = ring(seed), _Gan()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(_groups(model, 1e-3, 2e-3), betas=(0.5, 0.9)),
        loss=lambda batch: model.loss(batch["real"], batch["noise"]),
        batches=lambda: _batches(points, seed, constant_noise=faulty),
        num_steps=400,
        score=lambda: _score(model, ring(seed + 1000)),
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
    points, model, other = ring(seed), _Gan(), _Gan()
    groups = _groups(model, 1e-3, 1e-3)
    if faulty:
        groups[0] = _groups(other, 1e-3, 1e-3)[0]
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(groups, betas=(0.5, 0.9), weight_decay=0.0),
        loss=lambda batch: model.loss(batch["real"], batch["noise"]),
        batches=lambda: _batches(points, seed),
        num_steps=400,
        score=lambda: _score(model, ring(seed + 1000)),
    )


GAN = (judge_too_strong, generator_detached, noise_without_noise, group_of_another_generator)
