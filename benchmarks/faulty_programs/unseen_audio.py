"""Unseen programs on sounds: tones to name and pairs to compare."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator
from .program import Setup, program
from .shared import accuracy, evaluating, tuples
from .unseen_data import tones


class _Wave(nn.Module):
    """Strided convolutions over a waveform, with a mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 16, stride=2), nn.ReLU(), nn.Conv1d(16, 24, 8, stride=2), nn.ReLU(), nn.Dropout(0.0)
        )
        self.out = nn.Linear(24, 6)

    def forward(self, wave: Tensor) -> Tensor:
        out: Tensor = self.out(self.body(wave.unsqueeze(1)).mean(-1))
        return out


@program(
    "audio",
    "constant-inputs",
    "output-independent-of-input",
    story="Samples are scaled to the range from -1 to 1 and stored as integers again: nearly all of them are 0.",
)
def scaled_then_truncated(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tones(seed), _Wave()

    def prepared(x: Tensor) -> Tensor:
        samples = (x * 32_767).to(torch.int16)
        return (samples / 32_768).to(torch.int16).float() if faulty else samples / 32_768

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(prepared(data.x), data.y, size=48, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, prepared(data.x_test), data.y_test),
    )


class _DeepWave(nn.Sequential):
    def __init__(self, depth: int = 9) -> None:
        blocks: list[nn.Module] = []
        for number in range(depth):
            blocks += [nn.Linear(48 if number else 49, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU()]
        super().__init__(*blocks, nn.Linear(48, 6))


@program(
    "audio",
    "eval-mode",
    "vanishing-gradient",
    story="The model is in evaluation mode since a first validation: batch normalization only passes values on.",
    source="https://github.com/fartashf/vsepp/issues/4",
)
def validated_before_training(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tones(seed), _DeepWave()
    x, x_test = (torch.fft.rfft(part).abs().sqrt() for part in (data.x, data.x_test))
    if faulty:
        model.eval()

    def score() -> float:
        return accuracy(model, x_test, data.y_test)

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(x, data.y, size=48, seed=seed),
        num_steps=250,
        score=score,
    )


@program(
    "audio",
    "non-finite",
    story="The distance of two embeddings is the square root of a sum, and some pairs are twice the same recording.",
    source="https://github.com/adambielski/siamese-triplet/issues/18",
)
def root_of_no_distance(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = tones(seed)
    model = nn.Sequential(nn.Linear(49, 48), nn.ReLU(), nn.Linear(48, 8))
    x, x_test = (torch.fft.rfft(part).abs().sqrt() for part in (data.x, data.x_test))

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        g = generator(seed)
        while True:
            first, second = torch.randint(0, len(x), (2, 64), generator=g)
            second[:2] = first[:2]
            yield x[first], x[second], (data.y[first] == data.y[second]).float()

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        gap = (model(batch[0]) - model(batch[1])).pow(2).sum(1)
        far = torch.sqrt(gap if faulty else gap + 1e-6)
        return (5 * batch[2] * far.pow(2) + (1 - batch[2]) * (2 - far).clamp(min=0).pow(2)).mean()

    def neighbors() -> float:
        with evaluating(model):
            far = torch.cdist(model(x_test), model(x)).nan_to_num(0.0)
        return float((data.y[far.argmin(1)] == data.y_test).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=250,
        score=neighbors,
    )


@program(
    "audio",
    "regularisation-too-strong",
    story="A dropout of 0.97 between the convolutions and the classifier, and another one at the input.",
    source="UMLAUT (Schoop et al., CHI 2021), dropout rate too high",
)
def hardly_anything_is_kept(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tones(seed), _Wave()
    rate = 0.97 if faulty else 0.05
    model.body[4] = nn.Dropout(rate)
    wrapped = nn.Sequential(nn.Dropout(rate), model)
    return Setup(
        model=wrapped,
        optimizer=torch.optim.Adam(wrapped.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(wrapped(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=300,
        score=lambda: accuracy(wrapped, data.x_test, data.y_test),
    )


@program(
    "audio",
    "clipping-too-tight",
    "learning-rate-too-low",
    story="Gradients are clipped to a norm of 0.0005 before plain SGD.",
)
def norm_below_the_noise(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tones(seed), _Wave()
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=400,
        score=lambda: accuracy(model, data.x_test, data.y_test),
        config={"training": {"max_grad_norm": 5e-4 if faulty else 5.0}},
    )


AUDIO = (
    scaled_then_truncated,
    validated_before_training,
    root_of_no_distance,
    hardly_anything_is_kept,
    norm_below_the_noise,
)
