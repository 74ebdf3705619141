"""Next programs with an answer per pixel or place: segmentation, keypoints, counting, super-resolution."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import StepLR

from .data import Split, digits, discs, generator, split
from .program import Setup, program
from .shared import evaluating, explained, tuples


def unet(outputs: int) -> nn.Sequential:
    """Return a few convolutions that keep the size of the image."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, outputs, 3, padding=1),
    )


def iou(model: nn.Module, data: Split, *, classes: bool = False) -> float:
    """Return the intersection over union of the discs found."""
    with evaluating(model):
        out = model(data.x_test)
    found = out.argmax(1, keepdim=True) == 1 if classes else out > 0
    true = data.y_test > 0.5
    return float((found & true).sum() / (found | true).sum().clamp(min=1))


@program(
    "segmentation",
    "schedule-error",
    "learning-rate-too-low",
    story="A StepLR meant for epochs is stepped behind every batch and takes the learning rate to nothing.",
    source="pytorch/tutorials#640",
)
def stepped_behind_every_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = discs(seed), unet(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return Setup(
        model=net,
        optimizer=optimizer,
        loss=lambda batch: F.binary_cross_entropy_with_logits(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=240,
        score=lambda: iou(net, data),
        scheduler=StepLR(optimizer, step_size=3 if faulty else 3 * 23, gamma=0.5),
    )


@program(
    "segmentation",
    "constant-targets",
    "all-ignored-targets",
    "suspicious-perfection",
    story="The masks hold 0 and 255, and 255 is the value the loss ignores: only background is left to learn.",
    loss_tells=False,
)
def mask_value_is_ignored(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = discs(seed), unet(2)
    masks = data.y.squeeze(1).long() * (255 if faulty else 1)
    criterion = nn.CrossEntropyLoss(ignore_index=255)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=lambda batch: criterion(net(batch[0]), batch[1]),
        batches=tuples(data.x, masks, size=16, seed=seed),
        num_steps=200,
        score=lambda: iou(net, data, classes=True),
    )


class _Mask(nn.Module):
    def __init__(self, softmax: bool) -> None:
        super().__init__()
        self.body = unet(1)
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        return logits.softmax(1) if self.softmax else logits.sigmoid()


@program(
    "segmentation",
    "softmax-axis",
    "zero-gradient",
    "output-independent-of-input",
    "wrong-loss",
    story="A softmax over the only channel of the mask makes every pixel 1; a Dice loss follows.",
    source="DEEP-PolyU/KEQA_WSDM19#2",
)
def softmax_over_one_channel(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = discs(seed), _Mask(faulty)

    def dice(batch: tuple[Tensor, Tensor]) -> Tensor:
        found, mask = net(batch[0]), batch[1]
        loss: Tensor = 1 - (2 * (found * mask).sum() + 1) / (found.sum() + mask.sum() + 1)
        return loss

    def score() -> float:
        with evaluating(net):
            found, true = net(data.x_test) > 0.5, data.y_test > 0.5
        return float((found & true).sum() / (found | true).sum().clamp(min=1))

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=dice,
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=250,
        score=score,
    )


def places(seed: int, count: int = 600, side: int = 12) -> Split:
    """Return images with a bright disc, and the place of its center in pixels of a picture 640 wide."""
    g = generator(seed)
    axis = torch.arange(side, dtype=torch.float32)
    center = torch.rand(count, 2, generator=g) * (side - 4) + 2
    far = (axis.view(1, side, 1) - center[:, 0].view(-1, 1, 1)) ** 2 + (axis - center[:, 1].view(-1, 1, 1)) ** 2
    image = torch.exp(-far / 3) + 0.05 * torch.randn(count, side, side, generator=g)
    return split(image.unsqueeze(1), center * (640 / side))


@program(
    "keypoints",
    "unscaled-targets",
    "learning-rate-too-low",
    story="A network predicts the place of a keypoint in pixels of a 640 pixel picture instead of shares of its width.",
    loss_tells=False,
)
def keypoints_in_pixels(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = places(seed)
    y, y_test = (data.y, data.y_test) if faulty else (data.y / 320 - 1, data.y_test / 320 - 1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 32), nn.Tanh(), nn.Linear(32, 2))
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-3),
        loss=lambda batch: F.mse_loss(net(batch[0]), batch[1]),
        batches=tuples(data.x, y, size=32, seed=seed),
        num_steps=400,
        score=lambda: explained(net, data.x_test, y_test),
    )


def crowds(seed: int, count: int = 700) -> Split:
    """Return images of some points, and how many there are."""
    g = generator(seed)
    number = torch.randint(1, 9, (count,), generator=g)
    x = 0.05 * torch.randn(count, 1, 10, 10, generator=g)
    for row in range(count):
        spots = torch.randperm(100, generator=g)[: int(number[row])]
        x[row, 0].view(-1)[spots] += 1
    return split(x, number.float().unsqueeze(1))


@program(
    "counting",
    "dead-units",
    "zero-gradient",
    "poor-initialisation",
    "output-independent-of-input",
    story="The head that counts people ends in a ReLU and starts below zero: it says 0 and has no gradient.",
    source="jvargasmu/population_estimation#68",
)
def counter_starts_below_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = crowds(seed)
    head: list[nn.Module] = [nn.Linear(32, 1), nn.ReLU() if faulty else nn.Softplus()]
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), *head)
    with torch.no_grad():
        list(net.parameters())[-1].fill_(-1.0)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        loss=lambda batch: F.l1_loss(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=350,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


@program(
    "autoencoder",
    "repeated-batch",
    "suspicious-perfection",
    story="The switch that shows one batch again and again, for a test of the pipeline, was left on.",
    loss_tells=False,
)
def overfit_switch_left_on(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    g = generator(seed)
    noisy = data.x + 0.7 * torch.randn(data.x.shape, generator=g)
    noisy_test = data.x_test + 0.7 * torch.randn(data.x_test.shape, generator=g)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

    def batches() -> Iterator[dict[str, Tensor]]:
        loader = tuples(noisy, data.x.flatten(1), size=3, seed=seed)()
        first = next(loader)
        while True:
            x, y = first if faulty else next(loader)
            yield {"noisy": x, "clean": y}

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3),
        loss=lambda batch: F.mse_loss(net(batch["noisy"]), batch["clean"]),
        batches=batches,
        num_steps=300,
        score=lambda: explained(net, noisy_test, data.x_test.flatten(1)),
    )


@program(
    "vision",
    "clipping-too-tight",
    "learning-rate-too-low",
    story="A network for super-resolution is trained with SGD and gradients clipped to a norm of 0.0001.",
    source="twtygqyy/pytorch-vdsr#2",
)
def super_resolution_clipped(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    small, small_test = F.avg_pool2d(data.x, 2), F.avg_pool2d(data.x_test, 2)
    net = nn.Sequential(
        nn.Upsample(scale_factor=2), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)
    )
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
        loss=lambda batch: F.mse_loss(net(batch[0]), batch[1]),
        batches=tuples(small, data.x, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(net, small_test, data.x_test),
        config={"training": {"max_grad_norm": 1e-4 if faulty else 1.0}},
    )


DENSE = (
    stepped_behind_every_batch,
    mask_value_is_ignored,
    softmax_over_one_channel,
    keypoints_in_pixels,
    counter_starts_below_zero,
    overfit_switch_left_on,
    super_resolution_clipped,
)
