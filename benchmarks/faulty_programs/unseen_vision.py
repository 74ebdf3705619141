"""Unseen programs on images: stripes, arrows and digits."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, generator
from .program import Setup, program
from .shared import accuracy, indices, mlp, tuples
from .unseen_data import arrows, stripes


class _StripeNet(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3, stride=2)])
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        out: Tensor = self.out(x.amax(dim=(2, 3)))
        return out


def _small_conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12 * 16, 10)
    )


@program(
    "vision",
    "labels-shuffled",
    story="Images of arrows are mirrored at random in both directions, and the label keeps the old direction.",
    source="https://github.com/zllrunning/face-parsing.PyTorch/issues/57",
)
def mirrored_without_relabelling(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = arrows(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(81, 48), nn.ReLU(), nn.Linear(48, 4))

    def augmented() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed + 1)
        for rows in indices(len(data.x), 48, seed):
            x, y = data.x[rows], data.y[rows]
            for axis, first in ((3, 0), (2, 2)):
                turn = torch.rand(len(x), generator=g) < 0.5
                x = torch.where(turn.view(-1, 1, 1, 1), x.flip(axis), x)
                other = torch.where(y // 2 * 2 == first, 2 * first + 1 - y, y)
                y = y if faulty else torch.where(turn, other, y)
            yield x, y

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=augmented,
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "vision",
    "unscaled-data",
    "learning-rate-too-high",
    "exploding-gradient",
    "dead-units",
    story="Pixels from 0 to 255 go into a convolutional network without normalization layers.",
    source="https://github.com/soumith/imagenet-multiGPU.torch/pull/18",
)
def bytes_into_convolutions(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = stripes(seed), _StripeNet()

    def prepared(x: Tensor) -> Tensor:
        return x * 255 if faulty else (x - 0.5) / 0.2

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(prepared(data.x), data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, prepared(data.x_test), data.y_test),
    )


@program(
    "vision",
    "poor-initialisation",
    "exploding-gradient",
    "learning-rate-too-high",
    story="Every weight is drawn from the standard normal distribution, whatever the fan-in.",
    source="AUTOTRAINER (Zhang et al., ICSE 2021), exploding gradient by a wrong initializer",
    same_start=False,
)
def standard_normal_weights(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    model = mlp(64, 64, 64, 64, 64, 10)
    for layer in model:
        if isinstance(layer, nn.Linear):
            if faulty:
                nn.init.normal_(layer.weight)
            else:
                nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x.flatten(1), data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test.flatten(1), data.y_test),
    )


@program(
    "vision",
    "labels-shuffled",
    story="One-hot labels are turned into numbers by argmax over the batch instead of the classes; with ten images "
    "per batch and ten classes the shapes fit.",
)
def argmax_over_the_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _small_conv()
    one_hot = F.one_hot(data.y, 10)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["image"]), batch["label"].argmax(dim=0 if faulty else 1))

    def batches() -> Iterator[dict[str, Tensor]]:
        for rows in indices(len(data.x), 10, seed):
            yield {"image": data.x[rows], "label": one_hot[rows]}

    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3),
        loss=loss,
        batches=batches,
        num_steps=350,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _Bottleneck(nn.Module):
    def __init__(self, no_grad: bool) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 3))
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(3, 10))
        self.no_grad = no_grad

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.no_grad):
            features = self.trunk(x)
        out: Tensor = self.head(features)
        return out


@program(
    "vision",
    "zero-gradient",
    "frozen-parameters",
    story="The trunk still runs under torch.no_grad, left over from extracting features; it is untrained.",
    source="https://github.com/INVOKERer/AdaRevD/issues/9",
)
def trunk_without_gradients(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _Bottleneck(faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "vision",
    "wrong-loss",
    story="nll_loss gets the scores of the last layer without log_softmax: the loss falls without bound.",
    source="https://github.com/flashlight/flashlight/issues/137",
    loss_tells=False,
)
def scores_for_likelihoods(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = stripes(seed), _StripeNet()
    x, x_test = (data.x - 0.5) / 0.2, (data.x_test - 0.5) / 0.2

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        scores = model(batch[0])
        return F.nll_loss(scores if faulty else scores.log_softmax(-1), batch[1])

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, x_test, data.y_test),
    )


@program(
    "vision",
    "learning-rate-too-high",
    "dead-units",
    "exploding-gradient",
    "oscillation",
    story="RMSprop with a learning rate of 0.3.",
    source="UMLAUT (Schoop et al., CHI 2021), learning rate too high",
)
def rmsprop_of_a_third(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _small_conv()
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=0.3 if faulty else 1e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "vision",
    "dead-units",
    "poor-initialisation",
    "zero-gradient",
    "output-independent-of-input",
    story="Inverted images are shifted to values from -1 to 0, and the first weights are all positive: no ReLU is on.",
    source="Lu et al., Dying ReLU and initialization (2020)",
    same_start=False,
)
def only_negative_sums(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    first = model[1]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.weight.uniform_(0.0 if faulty else -0.2, 0.2)
        first.bias.zero_()
    return Setup(
        model=model,
        optimizer=torch.optim.NAdam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(-batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, -data.x_test, data.y_test),
    )


@program(
    "vision",
    "vanishing-gradient",
    "poor-initialisation",
    story="Twelve tanh layers start from weights of deviation 0.03: signal and gradient shrink in every layer.",
    source="AUTOTRAINER (Zhang et al., ICSE 2021), vanishing gradient",
    same_start=False,
)
def twelve_shrinking_layers(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    model = mlp(64, *[40] * 12, 10, act=nn.Tanh)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.03 if faulty else layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x.flatten(1) * 2 - 1, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test.flatten(1) * 2 - 1, data.y_test),
    )


@program(
    "vision",
    "repeated-batch",
    story="The sampler is seeded again for every batch, so that every step sees the same images.",
    loss_tells=False,
)
def seeded_every_step(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _small_conv()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        while True:
            if faulty:
                g.manual_seed(seed)
            rows = torch.randint(0, len(data.x), (16,), generator=g)
            yield data.x[rows], data.y[rows]

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=batches,
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


VISION = (
    mirrored_without_relabelling,
    bytes_into_convolutions,
    standard_normal_weights,
    argmax_over_the_batch,
    trunk_without_gradients,
    scores_for_likelihoods,
    rmsprop_of_a_third,
    only_negative_sums,
    twelve_shrinking_layers,
    seeded_every_step,
)
