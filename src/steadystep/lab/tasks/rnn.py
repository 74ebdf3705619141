"""An LSTM over bytes, Adam: norms that jump with the text."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.lab.gpt import NUM_BYTES
from steadystep.lab.tasks.evaluating import evaluating
from steadystep.lab.tasks.task import Task, TaskInfo
from steadystep.lab.text import TopicsText


@final
class ByteLSTM(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.cells = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, NUM_BYTES)

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy in nats of [batch, time + 1] bytes."""
        hidden, _ = self.cells(self.bytes(text[:, :-1]))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


def make(seed: int) -> Task:
    """Width 32, 8 windows of 24 bytes."""
    torch.manual_seed(seed)
    model = ByteLSTM(32)
    text = TopicsText(context=24, batch_size=8, seed=seed)
    windows = text.held_out()

    def held_out() -> float:
        with evaluating(model):
            return float(model.loss(windows))  # sync: when the held-out loss is asked for

    return Task(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        batch=text.batch,
        loss=model.loss,
        held_out=held_out,
    )


RNN = TaskInfo(name="rnn", about="byte LSTM, Adam 5e-3", num_steps=2000, make=make)
