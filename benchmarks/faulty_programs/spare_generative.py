"""Spare generative programs: adversaries, flows, clouds of points, pictures without noise, and sparse codes."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, discs, generator, ring
from .program import Setup, program
from .shared import energy_distance, evaluating, explained, mlp, singles, tuples


class _Players(torch.optim.Adam):
    """One Adam for two players whose zero_grad clears the first group, or both."""

    def __init__(self, players: Iterable[nn.Module], lr: float, clears: int) -> None:
        super().__init__([{"params": list(player.parameters())} for player in players], lr=lr, betas=(0.5, 0.9))
        self.clears = clears

    def zero_grad(self, set_to_none: bool = True) -> None:
        del set_to_none
        for group in self.param_groups[: self.clears]:
            for p in group["params"]:
                p.grad = None


@program(
    "gan",
    "missing-zero-grad",
    "oscillation",
    story="Only the generator's gradients are cleared: the discriminator's add up over all steps.",
    source="https://github.com/ajbrock/BigGAN-PyTorch/issues/25",
    loss_tells=False,
)
def judge_keeps_its_gradients(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    real, g = 0.7 * torch.randn(2048, 2, generator=generator(seed)) + torch.tensor([2.0, -1.0]), generator(seed)
    maker, judge = mlp(2, 32, 2), mlp(2, 32, 32, 1, act=lambda: nn.LeakyReLU(0.2))
    noise, fixed = torch.randn(20_000, 2, generator=g), torch.randn(400, 2, generator=g)
    net = nn.ModuleDict({"maker": maker, "judge": judge})

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        fake = maker(batch[1])
        told = F.softplus(-judge(batch[0])).mean() + F.softplus(judge(fake.detach())).mean()
        judge.requires_grad_(False)
        fooled = F.softplus(-judge(fake)).mean()
        judge.requires_grad_(True)
        return told + fooled

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            rows = torch.randint(0, 2048, (64,), generator=g)
            yield real[rows], noise[torch.randint(0, len(noise), (64,), generator=g)]

    def score() -> float:
        with evaluating(net):
            return -energy_distance(maker(fixed), real[:400])

    return Setup(
        model=net,
        optimizer=_Players((maker, judge), 2e-3, clears=1 if faulty else 2),
        loss=loss,
        batches=batches,
        num_steps=500,
        score=score,
    )


class _Flow(nn.Module):
    """Affine couplings that take turns on the two coordinates; returns the negative log likelihood of each point."""

    def __init__(self, depth: int, bounded: bool) -> None:
        super().__init__()
        self.bounded = bounded
        self.nets = nn.ModuleList(mlp(1, 32, 2) for _ in range(depth))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.unbind(1)
        volume = torch.zeros(len(x))
        for net in self.nets:
            scale, shift = net(a.unsqueeze(1)).unbind(1)
            scale = scale.tanh() if self.bounded else scale
            a, b = b * scale.exp() + shift, a
            volume = volume + scale
        return 0.5 * (a.square() + b.square()) - volume


@program(
    "flow",
    "exploding-gradient",
    "non-finite",
    story="The logarithms of the scales of RealNVP go through exp without the tanh of the paper, in three couplings.",
    source="https://github.com/ELIFE-ASU/INNLab/issues/7",
)
def scales_without_a_bound(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, test = ring(seed), ring(seed + 50, 512)
    net = _Flow(3, bounded=not faulty)

    def score() -> float:
        with evaluating(net):
            return -float(net(test).mean().nan_to_num(1e6, 1e6).clamp(max=1e6).log1p())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3),
        loss=lambda batch: net(batch).mean(),
        batches=singles(data, size=128, seed=seed),
        num_steps=300,
        score=score,
    )


@program(
    "clouds",
    "batch-size-unfit",
    "wrong-loss",
    story="The distance of two clouds is taken with one point in each: no spread within them, so one dot is made.",
    loss_tells=False,
)
def clouds_of_one_point(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, g, size = ring(seed + 1), generator(seed), 1 if faulty else 96
    net, fixed = mlp(4, 48, 48, 2), torch.randn(400, 4, generator=g)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield data[torch.randint(0, len(data), (size,), generator=g)], torch.randn(size, 4, generator=g)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        made = net(batch[1])
        within = torch.cdist(made, made + 1e-6).sum() / max(size * (size - 1), 1)
        return 2 * torch.cdist(made, batch[0]).mean() - within

    def score() -> float:
        with evaluating(net):
            return -energy_distance(net(fixed), data[:400])

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=300,
        score=score,
    )


def _cleaner() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.SiLU(),
        nn.Conv2d(16, 16, 5, padding=2),
        nn.SiLU(),
        nn.Conv2d(16, 1, 3, padding=1),
    )


@program(
    "denoising",
    "target-leak",
    "suspicious-perfection",
    "wrong-loss",
    story="The noise is added to x in place before y = x is taken: the network is asked to give back what it gets.",
    source="https://github.com/keon/3-min-pytorch/issues/18",
    loss_tells=False,
)
def noise_in_the_target(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net, g = digits(), _cleaner(), generator(seed)
    dirt, dirt_test = (0.5 * torch.randn(x.shape, generator=g) for x in (data.x, data.x_test))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, noise = batch
        y = x + noise if faulty else x
        return F.mse_loss(net(x + noise), y)

    def score() -> float:
        with evaluating(net):
            return 1 - float((net(data.x_test + dirt_test) - data.x_test).square().mean() / data.x_test.var())

    return Setup(
        model=net,
        optimizer=torch.optim.Adadelta(net.parameters(), lr=1.0),
        loss=loss,
        batches=tuples(data.x, dirt, size=32, seed=seed),
        num_steps=200,
        score=score,
    )


@program(
    "denoising",
    "regularisation-too-strong",
    "wrong-loss",
    story="The total variation of the picture is summed where the error is averaged: one flat grey costs least.",
)
def variation_is_summed(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = discs(seed + 2), _cleaner()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        made = net(batch[0])
        steps = torch.cat([made.diff(dim=2).abs().flatten(), made.diff(dim=3).abs().flatten()])
        return F.mse_loss(made, batch[1]) + 0.01 * (steps.sum() / len(made) if faulty else steps.mean())

    return Setup(
        model=net,
        optimizer=torch.optim.RAdam(net.parameters(), lr=5e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=200,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


def _features() -> Callable[[Tensor], Tensor]:
    """Return what a fixed network of random filters sees in a picture."""
    eye = nn.Sequential(nn.Conv2d(1, 16, 3), nn.LeakyReLU(), nn.Conv2d(16, 16, 3, stride=2)).requires_grad_(False)
    return lambda x: eye(x) * 4


@program(
    "superresolution",
    "zero-gradient",
    "learning-rate-too-low",
    story="The probe that records features for the perceptual loss detaches them: a small share of an error trains.",
    source="https://github.com/myscience/open-genie/issues/6",
)
def features_are_detached(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, see = digits(), _features()
    net = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 4, 3, padding=1), nn.PixelShuffle(2))

    def loss(batch: tuple[Tensor]) -> Tensor:
        made = net(F.avg_pool2d(batch[0], 2))
        seen = see(made).detach() if faulty else see(made)
        return F.mse_loss(seen, see(batch[0])) + 0.003 * F.l1_loss(made, batch[0])

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=loss,
        batches=tuples(data.x, size=32, seed=seed),
        num_steps=250,
        score=lambda: explained(net, F.avg_pool2d(data.x_test, 2), data.x_test),
    )


class _SparseCode(nn.Module):
    def __init__(self, inputs: int, latents: int) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(inputs, latents), nn.Linear(latents, inputs)

    def code(self, x: Tensor) -> Tensor:
        """Return the latents, most of which are meant to be zero."""
        return self.read(x).relu()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.code(x))  # type: ignore[no-any-return]


@program(
    "autoencoder",
    "dead-units",
    "learning-rate-too-high",
    "regularisation-too-strong",
    story="Sparse codes are learned at forty times the rate of the paper: in a few steps nearly all latents are dead.",
    source="https://github.com/decoderesearch/SAELens/issues/67",
)
def latents_die_at_once(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed)
    parts = F.normalize(torch.randn(48, 24, generator=g), dim=1)
    active = torch.rand(3000, 48, generator=g) * (torch.rand(3000, 48, generator=g) < 0.06)
    x = 2 * active @ parts + 0.8
    net = _SparseCode(24, 96)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.2 if faulty else 5e-3, betas=(0.0, 0.999)),
        loss=lambda batch: F.mse_loss(net(batch), batch) + 0.005 * net.code(batch).sum(1).mean(),
        batches=singles(x[:2400], size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(net, x[2400:], x[2400:]),
    )


GENERATIVE = (
    judge_keeps_its_gradients,
    scales_without_a_bound,
    clouds_of_one_point,
    noise_in_the_target,
    variation_is_summed,
    features_are_detached,
    latents_die_at_once,
)
