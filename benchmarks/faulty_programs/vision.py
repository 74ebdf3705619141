"""Image programs on scikit-learn's digits and on synthetic discs."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, discs, generator
from .program import LoopFaults, Setup, program
from .shared import accuracy, dicts, evaluating, mlp, tuples


@program(
    "vision",
    "wrong-loss",
    story="The classifier returns softmax probabilities and the loss is cross_entropy, which applies softmax again.",
    source="https://github.com/Lightning-Universe/lightning-bolts/issues/654",
)
def softmax_twice(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers, nn.Softmax(dim=1)) if faulty else nn.Sequential(*layers)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


def _convnet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10)),
    )


@program(
    "vision",
    "labels-shuffled",
    story="Image files and label files are listed separately, unsorted, and paired by position.",
    source="https://github.com/chuanyangjin/fast-DiT/issues/4",
)
def unsorted_file_lists(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _convnet()
    labels = data.y[torch.randperm(len(data.y), generator=generator(seed))] if faulty else data.y
    criterion = nn.CrossEntropyLoss()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: criterion(model(batch["image"]), batch["label"]),
        batches=dicts({"image": data.x, "label": labels}, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "vision",
    "unshuffled-data",
    story="The files on disk are ordered by class and the loader does not shuffle, so a batch holds one class only.",
    source="https://github.com/zalandoresearch/fashion-mnist/pull/5",
    loss_tells=False,
)
def one_class_at_a_time(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 48, 10)
    order = data.y.argsort(stable=True)
    x, y = (data.x[order], data.y[order]) if faulty else (data.x, data.y)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(x.flatten(1), y, size=16, seed=seed, shuffle=not faulty),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test.flatten(1), data.y_test),
    )


def _deep_normed() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


@program(
    "vision",
    "eval-mode",
    "vanishing-gradient",
    story="A validation pass before training puts the network into eval mode and nothing puts it back: batch "
    "normalization uses its initial running statistics.",
    source="https://github.com/wkentaro/pytorch-fcn/pull/56",
)
def stays_in_eval(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _deep_normed()
    model.train(not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "vision",
    "dead-units",
    "poor-initialisation",
    "zero-gradient",
    story="A hand-written initialization sets every convolution bias to -4, so no ReLU is ever active.",
    same_start=False,
)
def negative_biases(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _convnet()
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.constant_(layer.bias, -4.0 if faulty else 0.0)  # type: ignore[arg-type]
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "vision",
    "zero-gradient",
    story="zero_grad is called after backward and before step, so every update applies a gradient of zero.",
    source="https://github.com/Tony-Y/pytorch_warmup/issues/12",
)
def zero_grad_before_step(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 64, 32, 10, act=nn.GELU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch["pixels"].flatten(1)), batch["digit"]),
        batches=dicts({"pixels": data.x, "digit": data.y}, size=50, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test.flatten(1), data.y_test),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200),
        loop=LoopFaults(zero_grad_before_step=faulty),
    )


class _Segmenter(nn.Module):
    def __init__(self, squash: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 1, 3, padding=1))
        self.squash = squash

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return torch.sigmoid(x) if self.squash else x


@program(
    "vision",
    "wrong-loss",
    "saturation",
    story="The head ends in a sigmoid and the loss is BCEWithLogitsLoss; no pixel can get a probability below 0.5.",
    source="https://github.com/Turoad/lanedet/issues/32",
)
def sigmoid_twice(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = discs(seed), _Segmenter(squash=faulty)
    criterion = nn.BCEWithLogitsLoss()

    def overlap() -> float:
        with evaluating(model):
            found, wanted = torch.sigmoid(model(data.x_test)) > 0.5, data.y_test > 0.5
        return float((found & wanted).sum() / (found | wanted).sum().clamp(min=1))

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: criterion(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=200,
        score=overlap,
    )


@program(
    "vision",
    "batch-size-unfit",
    story="A network with batch normalization is trained with two images per batch because of memory.",
    source="https://github.com/BCV-Uniandes/DMS/issues/30",
)
def two_images_per_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _deep_normed()
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=2 if faulty else 32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


VISION = (
    softmax_twice,
    unsorted_file_lists,
    one_class_at_a_time,
    stays_in_eval,
    negative_biases,
    zero_grad_before_step,
    sigmoid_twice,
    two_images_per_batch,
)
