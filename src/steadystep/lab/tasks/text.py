"""Tasks that predict the next byte of English."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from steadystep.lab.gpt import GPT, NUM_BYTES, GPTParts, GPTSize, TopicsText
from steadystep.lab.tasks.task import Task, TaskInfo, evaluating


def byte_text(
    model: nn.Module, loss: Callable[[Tensor], Tensor], optimizer: Optimizer, *, context: int, seed: int
) -> Task:
    """Eight windows a batch; `loss` takes [batch, context + 1] bytes."""
    text = TopicsText(context=context, batch_size=8, seed=seed)
    windows = text.held_out()

    def held_out() -> float:
        with evaluating(model):
            return float(loss(windows))  # sync: when the held-out loss is asked for

    return Task(model=model, optimizer=optimizer, batch=text.batch, loss=loss, held_out=held_out)


_BAD_STD = 0.5  # GPT-2's is 0.02


def make_gpt(seed: int) -> Task:
    """Two layers of width 32, 8 windows of 32 bytes."""
    return _gpt_task(seed, GPTParts(), lr=3e-3)


def make_post_ln(seed: int) -> Task:
    """The norm after each addition: gradients are largest near the output, and a large first step stalls it."""
    return _gpt_task(seed, GPTParts(norm="post"), lr=1e-3)


def make_bad_init(seed: int) -> Task:
    """All weights drawn 25 times too wide: the first loss is far above ln(256)."""
    return _gpt_task(seed, GPTParts(), lr=3e-3, std=_BAD_STD)


def _gpt_task(seed: int, parts: GPTParts, *, lr: float, std: float | None = None) -> Task:
    torch.manual_seed(seed)
    size = GPTSize(d_model=32, num_layers=2, num_heads=2, context=32)
    model = GPT(size, parts)
    if std is not None:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return byte_text(model, model.loss, optimizer, context=size.context, seed=seed)


GPT_TASK = TaskInfo(name="gpt", about="byte GPT, AdamW 3e-3", num_steps=2000, make=make_gpt)
GPT_POST_LN = TaskInfo(name="gpt-post-ln", about="post-LN byte GPT, AdamW 1e-3", num_steps=2000, make=make_post_ln)
GPT_BAD_INIT = TaskInfo(
    name="gpt-bad-init", about="byte GPT, weights 25 times too wide, AdamW 3e-3", num_steps=2000, make=make_bad_init
)


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


def make_rnn(seed: int) -> Task:
    """Width 32, 8 windows of 24 bytes."""
    return _rnn_task(seed, nn.LSTM, lr=5e-3)


def make_elman(seed: int) -> Task:
    """The same without gates (Elman 1990): gradients through 24 steps grow or fade with the recurrent weights."""
    return _rnn_task(seed, nn.RNN, lr=2e-3)


def _rnn_task(seed: int, kind: type[nn.LSTM] | type[nn.RNN], *, lr: float) -> Task:
    torch.manual_seed(seed)
    model = ByteRNN(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    return byte_text(model, model.loss, optimizer, context=_CONTEXT, seed=seed)


RNN = TaskInfo(name="rnn", about="byte LSTM, Adam 5e-3", num_steps=2000, make=make_rnn)
ELMAN = TaskInfo(name="elman", about="byte Elman network, Adam 2e-3", num_steps=2000, make=make_elman)
