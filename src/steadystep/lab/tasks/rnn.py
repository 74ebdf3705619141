"""Recurrent networks over bytes, Adam: norms that jump with the text."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.lab.gpt import NUM_BYTES
from steadystep.lab.tasks.byte_text import byte_text
from steadystep.lab.tasks.task import Task, TaskInfo

_WIDTH, _CONTEXT = 32, 24


@final
class ByteRNN(nn.Module):
    """Predicts the next byte."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.RNN]) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, _WIDTH)
        self.cells = kind(_WIDTH, _WIDTH, batch_first=True)
        self.head = nn.Linear(_WIDTH, NUM_BYTES)

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy in nats of [batch, time + 1] bytes."""
        hidden, _ = self.cells(self.bytes(text[:, :-1]))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


def make(seed: int) -> Task:
    """Width 32, 8 windows of 24 bytes."""
    return _task(seed, nn.LSTM, lr=5e-3)


def make_elman(seed: int) -> Task:
    """The same without gates (Elman 1990): gradients through 24 steps grow or fade with the recurrent weights."""
    return _task(seed, nn.RNN, lr=2e-3)


def _task(seed: int, kind: type[nn.LSTM] | type[nn.RNN], *, lr: float) -> Task:
    torch.manual_seed(seed)
    model = ByteRNN(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    return byte_text(model, model.loss, optimizer, context=_CONTEXT, seed=seed)


RNN = TaskInfo(name="rnn", about="byte LSTM, Adam 5e-3", num_steps=2000, make=make)
ELMAN = TaskInfo(name="elman", about="byte Elman network, Adam 2e-3", num_steps=2000, make=make_elman)
