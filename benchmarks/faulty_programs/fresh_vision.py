"""Fresh programs on images: detection with several heads, segmentation, classification."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator
from .fresh_data import Scenes, scans, scenes
from .program import Setup, program
from .shared import dicts, evaluating, tuples


class _Detector(nn.Module):
    """One box and one class per image."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
        )
        self.kind = nn.Linear(16 * width, 3)
        self.box = nn.Linear(16 * width, 4)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        features = self.stem(image).flatten(1)
        return {"kind": self.kind(features), "box": self.box(features)}


def _halves(seed: int) -> tuple[Scenes, Scenes]:
    everything = scenes(seed)
    return everything.part(slice(0, 600)), everything.part(slice(600, None))


def _found(model: nn.Module, held: Scenes, unit: float = 1.0) -> float:
    """Return half the share of right classes plus half the explained variance of the boxes, at least -1."""
    with evaluating(model):
        out: dict[str, Tensor] = model(held.image)
    right = float((out["kind"].argmax(-1) == held.kind).float().mean())
    error = (out["box"] / unit - held.box)[:, :2].pow(2).mean() / (held.box - held.box.mean(0))[:, :2].pow(2).mean()
    return (right + (max(-1.0, 1 - float(error)) if bool(error.isfinite()) else -1.0)) / 2


def _batches(train: Scenes, size: int, seed: int) -> Callable[[], Iterator[dict[str, Tensor]]]:
    return dicts({"image": train.image, "kind": train.kind, "box": train.box}, size=size, seed=seed)


@program(
    "detection",
    "unscaled-targets",
    story="Boxes are given in pixels of a photo 1,600 wide; their squared error drowns the class loss.",
)
def boxes_in_pixels(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (train, held), model = _halves(seed), _Detector()
    unit = 1600.0 if faulty else 1.0

    def loss(batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["image"])
        return F.cross_entropy(out["kind"], batch["kind"]) + F.mse_loss(out["box"], unit * batch["box"])

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=loss,
        batches=_batches(train, 32, seed),
        num_steps=250,
        score=lambda: _found(model, held, unit),
    )


@program(
    "detection",
    "learning-rate-too-high",
    "exploding-gradient",
    story="The rate was chosen for eight devices with 32 images each and is used on one with eight.",
    source="pytorch/vision#1230",
)
def rate_of_eight_devices(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (train, held), model = _halves(seed), _Detector()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["image"])
        return F.cross_entropy(out["kind"], batch["kind"]) + F.smooth_l1_loss(out["box"], batch["box"]) * 5

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02 * (32 if faulty else 1), momentum=0.9),
        loss=loss,
        batches=_batches(train, 8, seed),
        num_steps=500,
        score=lambda: _found(model, held),
    )


@program(
    "detection",
    "dead-units",
    "poor-initialisation",
    "zero-gradient",
    "output-independent-of-input",
    story="The bias of -4.6, a prior meant for the last layer of the object head, is given to every convolution.",
    same_start=False,
)
def prior_in_every_bias(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (train, held), model = _halves(seed), _Detector()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.constant_(module.bias, -math.log(99) if faulty else 0.0)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["image"])
        return F.cross_entropy(out["kind"], batch["kind"]) + F.l1_loss(out["box"], batch["box"])

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        loss=loss,
        batches=_batches(train, 32, seed),
        num_steps=300,
        score=lambda: _found(model, held),
    )


@program(
    "detection",
    "constant-targets",
    story="Anchors are in pixels and boxes from 0 to 1: none overlaps enough, and every cell is background.",
    source="ultralytics/yolov3#1673",
    loss_tells=False,
)
def no_anchor_matches(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    train, held = _halves(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 4, 3, padding=1),
    )

    def assigned(part: Scenes) -> Tensor:
        """Return 0 for background, or 1 + class in the cell of the box's center if its size fits the anchor's."""
        anchor = 0.4 * (16 if faulty else 1)
        size = part.box[:, 2]
        overlap = torch.minimum(size, torch.tensor(anchor)) / torch.maximum(size, torch.tensor(anchor))
        cell = (part.box[:, :2] * 4).long().clamp(max=3)
        target = torch.zeros(len(size), 4, 4, dtype=torch.long)
        target[torch.arange(len(size)), cell[:, 0], cell[:, 1]] = torch.where(overlap > 0.5, part.kind + 1, 0)
        return target

    def score() -> float:
        with evaluating(model):
            guess = model(held.image).argmax(1)
        cell = (held.box[:, :2] * 4).long().clamp(max=3)
        return float((guess[torch.arange(len(guess)), cell[:, 0], cell[:, 1]] == held.kind + 1).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(train.image, assigned(train), size=32, seed=seed),
        num_steps=300,
        score=score,
    )


def _unet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 3, 1)
    )


def _overlap(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the mean intersection over union of the two objects."""
    with evaluating(model):
        guess = model(x).argmax(1)
    shares = [((guess == k) & (y == k)).sum() / ((guess == k) | (y == k)).sum() for k in (1, 2)]
    return float(sum(shares)) / 2


@program(
    "segmentation",
    "labels-shuffled",
    story="The random flip draws once for the image and once more for the mask.",
    source="Hands-On Computer Vision with TensorFlow 2 (packtpub.com), chapter 10: augmenting images with label maps",
)
def mask_flipped_on_its_own(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = scans(seed), _unet()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        coin = generator(seed + 50)
        for x, y in tuples(data.x, data.y, size=16, seed=seed)():
            turns = [d for d in (-1, -2) if torch.rand(1, generator=coin) < 0.5]
            again = [d for d in (-1, -2) if torch.rand(1, generator=coin) < 0.5]
            yield x.flip(turns), y.flip(again if faulty else turns)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=batches,
        num_steps=200,
        score=lambda: _overlap(model, data.x_test, data.y_test),
    )


@program(
    "segmentation",
    "softmax-axis",
    "wrong-loss",
    story="log_softmax(dim=-1) normalizes over the width of the image instead of over the classes.",
    source="hfslyc/AdvSemiSeg#73",
)
def softmax_over_the_width(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = scans(seed), _unet()
    criterion = nn.NLLLoss()
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True),
        loss=lambda batch: criterion(F.log_softmax(model(batch["slice"]), dim=-1 if faulty else 1), batch["organ"]),
        batches=dicts({"slice": data.x, "organ": data.y}, size=16, seed=seed),
        num_steps=200,
        score=lambda: _overlap(model, data.x_test, data.y_test),
    )


@program(
    "segmentation",
    "unscaled-data",
    "exploding-gradient",
    story="Scans enter in Hounsfield units, from -1,000 to 3,000, instead of about -1 to 1.",
)
def hounsfield_units(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = scans(seed), _unet()
    scale, shift = (1000.0, 800.0) if faulty else (1.0, 0.0)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x * scale + shift, data.y, size=16, seed=seed),
        num_steps=250,
        score=lambda: _overlap(model, data.x_test * scale + shift, data.y_test),
        config={"training": {"max_grad_norm": 5.0}},
    )


@program(
    "segmentation",
    "all-ignored-targets",
    "zero-gradient",
    story="The table from colors to classes is keyed by another color order: every pixel becomes void, 255.",
    loss_tells=False,
)
def every_pixel_is_void(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = scans(seed), _unet()
    colors = torch.tensor([[0, 0, 128], [220, 20, 60], [70, 130, 180]])
    known = {tuple(c.flip(0).tolist() if faulty else c.tolist()): k for k, c in enumerate(colors)}
    lookup = torch.tensor([known.get(tuple(c.tolist()), 255) for c in colors])

    def loss(batch: Any) -> Tensor:
        each = F.cross_entropy(model(batch[0]), lookup[batch[1]], ignore_index=255, reduction="none")
        return each.sum() / ((lookup[batch[1]] != 255).sum() + 1e-6)

    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=2e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=200,
        score=lambda: _overlap(model, data.x_test, data.y_test),
    )


@program(
    "segmentation",
    "schedule-error",
    "learning-rate-too-low",
    story="Milestones of 6, 12 and 18 epochs are reached after 18 batches, because the scheduler is stepped per batch.",
    source="ivadomed/ivadomed#55",
)
def milestones_per_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = scans(seed), _unet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    milestones = [m * (1 if faulty else 18) for m in (6, 12, 18)]
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=300,
        score=lambda: _overlap(model, data.x_test, data.y_test),
        scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1),
    )


VISION = (
    boxes_in_pixels,
    rate_of_eight_devices,
    prior_in_every_bias,
    no_anchor_matches,
    mask_flipped_on_its_own,
    softmax_over_the_width,
    hounsfield_units,
    every_pixel_is_void,
    milestones_per_batch,
)
