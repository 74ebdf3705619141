"""Tasks that predict the next byte of English, and the models for it.

The transformer is a small one in the manner of GPT-2 (Radford et al. 2019): pre-LN, and post-LN if asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from steadystep.lab.tasks.task import Task, TaskInfo, evaluating_apart
from steadystep.layers import BoundedEmbedding, StableAttention

NUM_BYTES = 256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSize:
    """Width, depth and context of a model."""

    d_model: int = 64
    num_layers: int = 4
    num_heads: int = 4
    context: int = 32


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GPTParts:
    """What the blocks are made of; the defaults are GPT-2's."""

    norm: Literal["pre", "post"] = "pre"
    """post is the order of Vaswani et al. 2017: the norm after the addition, none before the head."""
    attention: Literal["plain", "stable"] = "plain"
    """stable is `StableAttention` with qk-norm."""
    max_embedding_norm: float | None = None
    """With a number both tables are a `BoundedEmbedding`."""


@final
class Block(nn.Module):
    """Attention, then an MLP, each with its norm and added to the stream."""

    def __init__(self, size: GPTSize, parts: GPTParts) -> None:
        super().__init__()
        d = size.d_model
        self.num_heads = size.num_heads
        self.post = parts.norm == "post"
        self.attn_norm = nn.LayerNorm(d)
        if parts.attention == "stable":
            self.attn = StableAttention(d, size.num_heads, causal=True, init_method="small")
        else:
            self.qkv = nn.Linear(d, 3 * d)
            self.attn_out = nn.Linear(d, d)
        self.stable = parts.attention == "stable"
        self.mlp_norm = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same shape."""
        if self.post:
            x = self.attn_norm(x + self._attend(x))
            late: Tensor = self.mlp_norm(x + self.mlp(x))
            return late
        x = x + self._attend(self.attn_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        if self.stable:
            stable: Tensor = self.attn(x)
            return stable
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        plain: Tensor = self.attn_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return plain


@final
class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, size: GPTSize, parts: GPTParts | None = None) -> None:
        super().__init__()
        parts = parts or GPTParts()
        self.size = size
        self.bytes = _table(NUM_BYTES, size.d_model, parts)
        self.positions = _table(size.context, size.d_model, parts)
        self.blocks = nn.ModuleList(Block(size, parts) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.d_model) if parts.norm == "pre" else nn.Identity()
        self.head = nn.Linear(size.d_model, NUM_BYTES, bias=False)
        self.apply(_init)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] of bytes to logits over the next one."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy in nats of [batch, context + 1] bytes, each predicted from those before it."""
        logits = self(text[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def _table(rows: int, width: int, parts: GPTParts) -> nn.Embedding:
    if parts.max_embedding_norm is None:
        return nn.Embedding(rows, width)
    return BoundedEmbedding(rows, width, max_norm=parts.max_embedding_norm)


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@final
class TopicsText:
    """Random windows of bytes, the last tenth of the text held out."""

    def __init__(self, *, context: int, batch_size: int, seed: int) -> None:
        data = _topics()
        split = len(data) * 9 // 10
        self._train, self._held_out = data[:split], data[split:]
        self._window = context + 1
        self._batch_size = batch_size
        self._rng = torch.Generator().manual_seed(seed)

    def batch(self) -> Tensor:
        """The next [batch, context + 1] windows; the sequence is fixed by the seed."""
        return self._windows(self._train, self._batch_size, self._rng)

    def held_out(self, num_windows: int = 256) -> Tensor:
        """Always the same windows."""
        return self._windows(self._held_out, num_windows, torch.Generator().manual_seed(0))

    def _windows(self, data: Tensor, count: int, rng: torch.Generator) -> Tensor:
        starts = torch.randint(len(data) - self._window, (count,), generator=rng)
        return data[starts[:, None] + torch.arange(self._window)]


@cache
def _topics() -> Tensor:
    from pydoc_data import topics

    return torch.tensor(list("\n".join(topics.topics.values()).encode()), dtype=torch.long)


def byte_text(
    model: nn.Module, loss: Callable[[Tensor], Tensor], optimizer: Optimizer, *, context: int, seed: int
) -> Task:
    """Eight windows a batch; `loss` takes [batch, context + 1] bytes."""
    text = TopicsText(context=context, batch_size=8, seed=seed)
    windows = text.held_out()

    def held_out() -> float:
        with evaluating_apart(model):
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
