"""Held programs on images."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, discs, generator
from .program import Setup, program
from .shared import accuracy, dicts, evaluating, tuples


class _ConvNormAct(nn.Module):
    """Convolve, normalize and rectify, as in the model zoos."""

    def __init__(self, fan_in: int, fan_out: int, momentum: float = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(fan_out, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


def _zoo(depth: int, momentum: float = 0.1) -> nn.Sequential:
    blocks = [_ConvNormAct(1 if i == 0 else 12, 12, momentum) for i in range(depth)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10))


@program(
    "vision",
    "eval-mode",
    "vanishing-gradient",
    story="A validation before the first epoch left a deep network in eval mode: its norms pass on what they get.",
    source="https://github.com/joeynmt/joeynmt/issues/184",
)
def sanity_check_leaves_eval(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = _zoo(9)

    def validate() -> float:
        net.eval()
        with torch.no_grad():
            correct = (net(data.x_test[:64]).argmax(1) == data.y_test[:64]).float().mean()
        if not faulty:
            net.train()
        return float(correct)

    validate()
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=160,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "vision",
    "batch-dependence",
    "eval-mode",
    story="The momentum 0.9999 of another framework is 0.0001 here: the running statistics stay where they started.",
    source="https://github.com/pytorch/vision/issues/8250",
    loss_tells=False,
)
def momentum_turned_round(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = _zoo(4, momentum=1 - (0.9999 if faulty else 0.9))
    return Setup(
        model=net,
        optimizer=torch.optim.RMSprop(net.parameters(), lr=2e-3, alpha=0.9, momentum=0.9, eps=1e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1], label_smoothing=0.1),
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


class Detected(NamedTuple):
    """What a detector with two heads returns."""

    logits: Tensor
    boxes: Tensor


class _TwoHeads(nn.Module):
    """A shared trunk with a head for the class and one for the box."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2), nn.GELU(), nn.Conv2d(16, 16, 3, stride=2), nn.GELU())
        self.classes = nn.LazyLinear(4)
        self.boxes = nn.LazyLinear(4)
        self(torch.zeros(1, 1, 16, 16))

    def forward(self, image: Tensor) -> Detected:
        features = self.trunk(image).flatten(1)
        return Detected(self.classes(features), self.boxes(features))


def _scenes(seed: int, count: int = 700) -> dict[str, Tensor]:
    """Draw one bright rectangle per image; its class is the quarter its texture came from."""
    g = generator(seed)
    corner = torch.randint(0, 9, (count, 2), generator=g)
    size = torch.randint(3, 8, (count, 2), generator=g)
    kind = torch.randint(0, 4, (count,), generator=g)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    textures = torch.stack([torch.ones(16, 16), rows % 2, columns % 2, (rows + columns) % 2]).float()
    spot = (rows >= corner[:, :1, None]) & (rows < (corner + size)[:, :1, None])
    spot &= (columns >= corner[:, 1:, None]) & (columns < (corner + size)[:, 1:, None])
    image = spot * (0.5 + textures[kind]) + 0.1 * torch.randn(count, 16, 16, generator=g)
    boxes = torch.cat([corner, corner + size], dim=1).float() / 16
    return {"image": image.unsqueeze(1), "label": kind, "boxes": boxes}


@program(
    "detection",
    "unscaled-targets",
    "wrong-loss",
    story="Boxes are in pixels of a picture of 640; their loss drowns that of the classes in the shared trunk.",
    loss_tells=False,
)
def boxes_of_a_large_picture(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    scale = 640.0 if faulty else 1.0
    scenes = _scenes(seed)
    scenes["boxes"] = scenes["boxes"] * scale
    shown, held = ({k: v[:550] for k, v in scenes.items()}, {k: v[550:] for k, v in scenes.items()})
    model = _TwoHeads()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        found = model(batch["image"])
        classes = F.cross_entropy(found.logits, batch["label"])
        return classes + 10 * F.smooth_l1_loss(found.boxes, batch["boxes"], beta=0.1)

    def score() -> float:
        with evaluating(model):
            found = model(held["image"])
        correct = float((found.logits.argmax(1) == held["label"]).float().mean())
        far = float((found.boxes - held["boxes"]).abs().mean()) / scale
        return correct - min(far, 1.0)

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4),
        loss=loss,
        batches=dicts(shown, size=32, seed=seed),
        num_steps=350,
        score=score,
        config={"training": {"max_grad_norm": 5.0}},
    )


@program(
    "vision",
    "constant-inputs",
    "output-independent-of-input",
    story="The dataset returns images as uint8 after they were divided by 255: every pixel is zero.",
)
def bytes_after_the_division(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()

    def transform(image: Tensor) -> Tensor:
        image = 0.99 * image
        image = image.to(torch.uint8) if faulty else image
        return image.float()

    x, x_test = transform(data.x), transform(data.x_test)
    model = nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(180, 50), nn.ReLU(), nn.Linear(50, 10)
    )
    return Setup(
        model=model,
        optimizer=torch.optim.Adadelta(model.parameters(), lr=1.0),
        loss=lambda batch: F.nll_loss(F.log_softmax(model(batch[0]), dim=1), batch[1]),
        batches=tuples(x, data.y, size=64, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, x_test, data.y_test),
    )


@program(
    "detection",
    "dead-units",
    "poor-initialisation",
    "zero-gradient",
    story="The bias for rare positives, meant for the last layer of a dense detector, is set in every convolution.",
    source="https://github.com/andreaazzini/retinanet.pytorch/pull/1",
    same_start=False,
)
def prior_in_every_layer(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = discs(seed)
    subnet = nn.Sequential(
        *(layer for i in range(3) for layer in (nn.Conv2d(1 if i == 0 else 12, 12, 3, padding=1), nn.ReLU())),
        nn.Conv2d(12, 1, 3, padding=1),
    )
    prior = -math.log((1 - 0.1) / 0.1)
    layers = [m for m in subnet.modules() if isinstance(m, nn.Conv2d)]
    for layer in layers if faulty else layers[-1:]:
        nn.init.constant_(layer.bias, prior)  # type: ignore[arg-type]

    def focal(logits: Tensor, target: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).sum() / target.sum().clamp(min=1)

    def dice() -> float:
        with evaluating(subnet):
            found = (subnet(data.x_test) > 0).float()
        return float(2 * (found * data.y_test).sum() / (found.sum() + data.y_test.sum()))

    return Setup(
        model=subnet,
        optimizer=torch.optim.Adam(subnet.parameters(), lr=3e-3),
        loss=lambda batch: focal(subnet(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=200,
        score=dice,
    )


@program(
    "vision",
    "unshuffled-data",
    "oscillation",
    story="Files come folder by folder, one folder per class, and the loader of the notebook was left without shuffle.",
)
def folder_by_folder(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    order = torch.argsort(data.y, stable=True)
    images, labels = data.x[order], data.y[order]
    g = generator(seed)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            rows = torch.arange(len(labels)) if faulty else torch.randperm(len(labels), generator=g)
            for start in range(0, len(rows) - 20, 20):
                picked = rows[start : start + 20]
                yield images[picked], labels[picked]

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=loader,
        num_steps=330,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


VISION = (
    sanity_check_leaves_eval,
    momentum_turned_round,
    boxes_of_a_large_picture,
    bytes_after_the_division,
    prior_in_every_layer,
    folder_by_folder,
)
