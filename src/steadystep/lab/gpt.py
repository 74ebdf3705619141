"""A small pre-LN transformer over bytes in the manner of GPT-2 (Radford et al. 2019)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

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
class Block(nn.Module):
    """Attention, then an MLP, each behind a norm and added to the stream."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        d = size.d_model
        self.num_heads = size.num_heads
        self.attn_norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.attn_out = nn.Linear(d, d)
        self.mlp_norm = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(self.attn_norm(x)).view(batch, time, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_out(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


@final
class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.size = size
        self.bytes = nn.Embedding(NUM_BYTES, size.d_model)
        self.positions = nn.Embedding(size.context, size.d_model)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.d_model)
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


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
