"""One run of the precision study: a small transformer in fp32, bf16 or fp16, with a loss scaler or without."""

import time
from dataclasses import dataclass
from statistics import fmean, median
from typing import final

import torch
from torch import Tensor

from steadystep.lab.gpt import GPT, GPTSize
from steadystep.lab.tasks.evaluating import evaluating
from steadystep.lab.text import TopicsText
from steadystep.memory.saved_bytes import count_saved
from steadystep.precision import Precision, underflow_share
from steadystep.precision.precision import Format

FORMATS: dict[str, tuple[Format, bool]] = {
    "fp32": ("fp32", False),
    "bf16": ("bf16", False),
    "fp16, no scaling": ("fp16", False),
    "fp16 + scaling": ("fp16", True),
}
"""Number format and whether a loss scaler is used."""

SIZE = GPTSize(d_model=32, num_layers=2, num_heads=2)
LR = 3e-3
BATCH_SIZE = 8
_LOOK_EVERY = 10


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How it went."""

    held_out: float
    """In nats per byte and always in fp32, so that formats are compared by what they learned."""
    overflows: int
    """Updates whose gradients were not finite."""
    underflow: float
    """The mean share of gradient elements that are exactly zero."""
    saved_bytes: int
    """What one forward pass keeps for the backward pass."""


@final
class Training:
    """A model in one format; `divisor` makes the loss smaller, which Adam does not mind."""

    def __init__(self, name: str, *, divisor: float, seed: int) -> None:
        setting, self._scaled = FORMATS[name]
        torch.manual_seed(seed)
        self.model = GPT(SIZE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.text = TopicsText(context=SIZE.context, batch_size=BATCH_SIZE, seed=seed)
        self._precision = Precision(setting)
        self._divisor = divisor

    def loss(self, batch: Tensor) -> Tensor:
        """Under autocast."""
        with self._precision.autocast():
            return self.model.loss(batch) / self._divisor

    def backward(self, batch: Tensor) -> bool:
        """Gradients of one batch, unscaled; False if they are not finite."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        if self._scaled:
            self._precision.backward(loss)
            self._precision.unscale_(self.optimizer)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        return bool(torch.nn.utils.get_total_norm(self.grads()).isfinite())

    def update(self, *, finite: bool) -> None:
        """Without a scaler nobody looks: the update is taken, whatever it is."""
        if not self._scaled:
            self.optimizer.step()
        elif finite:
            self._precision.step(self.optimizer)
        else:
            self._precision.refuse(overflow=True)

    def grads(self) -> list[Tensor]:
        """Of all parameters."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def train(name: str, *, divisor: float, seed: int, num_steps: int) -> Run:
    """The loop as anybody writes it."""
    training = Training(name, divisor=divisor, seed=seed)
    batch = TopicsText(context=SIZE.context, batch_size=BATCH_SIZE, seed=seed).batch()
    saved = count_saved(training.model, lambda: training.loss(batch))
    overflows, zeros = 0, []
    for step in range(num_steps):
        finite = training.backward(training.text.batch())
        overflows += not finite
        if finite and step % _LOOK_EVERY == 0:
            zeros.append(float(underflow_share(training.grads())))
        training.update(finite=finite)
    with evaluating(training.model):
        held_out = float(training.model.loss(training.text.held_out()))
    return Run(held_out=held_out, overflows=overflows, underflow=fmean(zeros or [0.0]), saved_bytes=saved)


def speed(*, num_rounds: int, num_steps: int) -> dict[str, float]:
    """Time of a training step over that in fp32: formats take turns, so that a busy machine is busy for all of them."""
    trainings = {name: Training(name, divisor=1.0, seed=0) for name in FORMATS}
    rounds: list[dict[str, float]] = []
    for number in range(num_rounds + 1):
        took = {name: _seconds(training, num_steps) for name, training in trainings.items()}
        if number:  # the first is for warming up
            rounds.append({name: seconds / took["fp32"] for name, seconds in took.items()})
    return {name: median(each[name] for each in rounds) for name in FORMATS}


def _seconds(training: Training, num_steps: int) -> float:
    began = time.process_time()
    for _ in range(num_steps):
        training.update(finite=training.backward(training.text.batch()))
    return time.process_time() - began
