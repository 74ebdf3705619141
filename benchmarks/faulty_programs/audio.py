"""Programs on synthetic sounds: tones, chirps and clicks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import waves
from .program import LoopFaults, Setup, program
from .shared import accuracy, dicts, mlp, tuples


class _Listener(nn.Module):
    """One-dimensional convolutions over the waveform."""

    def __init__(self, softmax: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 12, 9, stride=3), nn.ReLU(), nn.Conv1d(12, 24, 5, stride=2), nn.ReLU())
        self.head = nn.Linear(24, 4)
        self.softmax = softmax

    def forward(self, wave: Tensor) -> Tensor:
        wave = self.body(wave.unsqueeze(1)).amax(-1)
        wave = self.head(wave)
        return F.softmax(wave, dim=1) if self.softmax else wave


@program(
    "audio",
    "wrong-loss",
    story="A convolutional recognizer returns softmax outputs to nn.CrossEntropyLoss.",
    source="https://github.com/jindongwang/Deep-learning-activity-recognition/issues/10",
)
def probabilities_as_logits(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = waves(seed), _Listener(softmax=faulty)
    criterion = nn.CrossEntropyLoss()
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss=lambda batch: criterion(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "audio",
    "missing-zero-grad",
    "learning-rate-too-high",
    story="The fine-tuning script of a voice detector calls backward and step, and never zero_grad.",
    source="https://github.com/snakers4/silero-vad/pull/699",
)
def gradients_pile_up(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = waves(seed), _Listener()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(model(batch["wave"]), batch["kind"]),
        batches=dicts({"wave": data.x, "kind": data.y}, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
        loop=LoopFaults(zero_grad_every=0 if faulty else 1),
    )


@program(
    "audio",
    "unscaled-data",
    "exploding-gradient",
    "learning-rate-too-high",
    "dead-units",
    story="Samples are read as 16-bit integers and cast to float without the division by 32,768.",
)
def sixteen_bit_samples(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = waves(seed), _Listener()
    unit = 32768.0 if faulty else 1.0
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x * unit, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test * unit, data.y_test),
    )


def _spectrum(wave: Tensor, floor: float) -> Tensor:
    power = torch.stft(wave, 32, 16, window=torch.hann_window(32), return_complex=True).abs() ** 2
    return (power + floor).log().flatten(1)


@program(
    "audio",
    "non-finite",
    "unscaled-data",
    story="The log spectrogram is taken without a floor; recordings padded with digital silence give log(0).",
)
def silence_in_decibels(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = waves(seed), mlp(17 * 9, 48, 4)
    padded = data.x.clone()
    padded[::50, 48:] = 0
    floor = 0.0 if faulty else 1e-4
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(_spectrum(batch[0], floor)), batch[1]),
        batches=tuples(padded, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, _spectrum(data.x_test, floor), data.y_test),
    )


@program(
    "audio",
    "schedule-error",
    "learning-rate-too-low",
    story="An exponential schedule meant for epochs, with gamma 0.8, is stepped after every batch.",
    source="https://github.com/ivadomed/ivadomed/pull/55",
)
def decay_per_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = waves(seed), _Listener()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    per_epoch = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8 ** (step // 100))
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8) if faulty else per_epoch,
    )


AUDIO = (
    probabilities_as_logits,
    gradients_pile_up,
    sixteen_bit_samples,
    silence_in_decibels,
    decay_per_batch,
)
