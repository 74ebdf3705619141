"""Spare programs on pictures: digits, masks, capsules, patches and depthwise filters."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, discs
from .program import Setup, program
from .shared import accuracy, evaluating, tuples


class Lion(torch.optim.Optimizer):
    """The sign of a mean of gradients, times the rate (Chen et al., 2023)."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every weight by the rate, against the sign."""
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_((0.9 * mean + 0.1 * p.grad).sign(), alpha=group["lr"])
                mean.mul_(0.99).add_(p.grad, alpha=0.01)
        return None


@program(
    "vision",
    "learning-rate-too-high",
    "oscillation",
    story="AdamW is replaced by Lion in the settings and the rate stays: each weight moves by it in each step.",
    source="https://github.com/lucidrains/denoising-diffusion-pytorch/issues/170",
)
def lion_at_the_rate_of_adam(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.GELU(), nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.GELU(),
        nn.Conv2d(24, 24, 3, padding=1), nn.GELU(), nn.Conv2d(24, 24, 3, padding=1), nn.GELU(),
        nn.Flatten(), nn.Linear(24 * 16, 64), nn.GELU(), nn.Linear(64, 10),
    )  # fmt: skip
    return Setup(
        model=net,
        optimizer=Lion(net.parameters(), lr=3e-2 if faulty else 5e-4),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


class _Unscaling(torch.optim.SGD):
    """SGD that divides the gradients by the scale of the loss first, as a gradient scaler does in its step."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, scale: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.scale = scale

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(self.scale)
        return super().step(closure)  # type: ignore[no-any-return]


def _masker() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 1, 1)
    )


def overlap(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the intersection over the union of the masks."""
    with evaluating(net):
        mask = net(x) > 0
    return float((mask & (y > 0)).sum() / (mask | (y > 0)).sum().clamp(min=1))


@program(
    "segmentation",
    "clipping-too-tight",
    "learning-rate-too-low",
    story="Gradients of a loss times 4096 are clipped to norm 1 before the scaler divides them by 4096 again.",
    source="https://github.com/milesial/Pytorch-UNet/issues/468",
)
def clipped_before_unscaling(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net, scale = discs(seed), _masker(), 4096.0
    return Setup(
        model=net,
        optimizer=_Unscaling(net.parameters(), lr=0.1, scale=scale),
        loss=lambda batch: scale * F.binary_cross_entropy_with_logits(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=220,
        score=lambda: overlap(net, data.x_test, data.y_test),
        config={"training": {"max_grad_norm": 1.0 if faulty else scale}},
    )


@program(
    "segmentation",
    "wrong-loss",
    story="The Dice coefficient is added to the loss as it is, without 1 minus: the better the overlap, the dearer.",
    source="https://github.com/IAmSuyogJadhav/3d-mri-brain-tumor-segmentation-using-autoencoder-regularization/issues/7",
    loss_tells=False,
)
def overlap_is_minimized(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = discs(seed + 3), _masker()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        mask = net(batch[0]).sigmoid()
        dice = 2 * (mask * batch[1]).sum() / (mask.square().sum() + batch[1].sum() + 1)
        size = (mask.mean() - batch[1].mean()).square()
        return dice + 0.1 * size if faulty else 1 - dice + 0.1 * size  # type: ignore[no-any-return]

    return Setup(
        model=net,
        optimizer=torch.optim.NAdam(net.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=180,
        score=lambda: overlap(net, data.x_test, data.y_test),
    )


class _Capsules(nn.Module):
    """16 capsules of 4 numbers vote for 10 capsules of 6, in three rounds of routing."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.first = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.votes = nn.Parameter(0.3 * torch.randn(16, 10, 16, 6))

    def forward(self, x: Tensor) -> Tensor:
        """Return the lengths of the ten capsules."""
        low = self.first(x).flatten(2)
        low = low / (1 + low.norm(dim=2, keepdim=True))
        votes = torch.einsum("bid,ijde->bije", low, self.votes)
        agreement = torch.zeros(votes.shape[:3])
        for _ in range(3):
            share = agreement.softmax(self.axis).unsqueeze(3)
            total = (share * votes).sum(1)
            size = total.norm(dim=2, keepdim=True) + 1e-6
            out = total * size / (1 + size.square())
            agreement = agreement + 8 * (votes * out.unsqueeze(1)).sum(3)
        return out.norm(dim=2)  # type: ignore[no-any-return]


@program(
    "vision",
    "softmax-axis",
    "batch-dependence",
    story="The routing of a capsule network takes the softmax without a dimension: it runs over the batch.",
    source="https://github.com/timomernick/pytorch-capsule/issues/12",
    loss_tells=False,
)
def capsules_routed_wrongly(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), _Capsules(axis=0 if faulty else 2)

    def margin(batch: tuple[Tensor, Tensor]) -> Tensor:
        length, wanted = net(batch[0]), F.one_hot(batch[1], 10)
        here, there = (0.9 - length).relu().square(), (length - 0.1).relu().square()
        return (wanted * here + 0.5 * (1 - wanted) * there).sum(1).mean()  # type: ignore[no-any-return]

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=margin,
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


def _depthwise(channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.ReLU(), nn.Conv2d(channels, channels, 1)]


@program(
    "vision",
    "poor-initialisation",
    "vanishing-gradient",
    story="Kaiming's fan-out of depthwise filters counts all channels: after seven of them hardly anything is left.",
    same_start=False,
)
def fan_out_of_a_depthwise_filter(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    blocks = [module for _ in range(7) for module in _depthwise(24)]
    net = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10)
    )
    for module in net:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out" if faulty else "fan_in", nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0] - 0.3), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test - 0.3, data.y_test),
    )


@program(
    "vision",
    "unscaled-data",
    "constant-inputs",
    story="Mean and deviation of pixels up to 255 are applied to pixels up to 1: all of them become about -2.1.",
)
def statistics_of_bytes(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, scale = digits(), 1.0 if faulty else 255.0
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))

    def prepare(x: Tensor) -> Tensor:
        return (x * scale - 77.9) / 96.1

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(prepare(batch[0])), batch[1]),
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, prepare(data.x_test), data.y_test),
    )


class _Patches(nn.Module):
    """A small transformer over the 16 patches of a digit and a token for the class."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early
        self.patch = nn.Linear(4, 32)
        self.place = nn.Parameter(0.2 * torch.randn(1, 17, 32))
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(F.unfold(x, 2, stride=2).transpose(1, 2))
        tokens = torch.cat([self.token.expand(len(x), 1, 32), patches], dim=1) + self.place
        encoded = self.encoder(tokens)
        return self.head((tokens if self.early else encoded)[:, 0])  # type: ignore[no-any-return]


@program(
    "vision",
    "output-independent-of-input",
    "zero-gradient",
    story="The head reads the class token from the list that goes into the encoder, not from the one that comes out.",
)
def token_before_the_encoder(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), _Patches(early=faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=220,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


VISION = (
    lion_at_the_rate_of_adam,
    clipped_before_unscaling,
    overlap_is_minimized,
    capsules_routed_wrongly,
    fan_out_of_a_depthwise_filter,
    statistics_of_bytes,
    token_before_the_encoder,
)
