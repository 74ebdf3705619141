"""Attention logits written out, one product at a time, in double precision."""

import math

import torch
from torch import Tensor, nn

from steadystep.layers import StableAttention

Rows = list[Tensor]


@torch.no_grad()
def stable_heads(module: StableAttention, x: Tensor) -> list[tuple[Rows, Rows]]:
    """All queries and all keys of each head, for each element of the batch."""
    size = module.d_model // module.n_heads
    found = []
    for sample in x.double():
        q = sample @ module.q_proj.weight.double().T
        k = sample @ module.k_proj.weight.double().T
        if module.q_proj.bias is not None:
            q, k = q + module.q_proj.bias.double(), k + module.k_proj.bias.double()
        for head in range(module.n_heads):
            part = slice(head * size, (head + 1) * size)
            found.append((_normed(q[:, part], module.q_norm), _normed(k[:, part], module.k_norm)))
    return found


@torch.no_grad()
def torch_heads(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> list[tuple[Rows, Rows]]:
    """The same for torch's module; `query` and `key` are [batch, time, width]."""
    size, e = module.head_dim, module.embed_dim
    weight_q = module.in_proj_weight[:e] if module.in_proj_weight is not None else module.q_proj_weight
    weight_k = module.in_proj_weight[e : 2 * e] if module.in_proj_weight is not None else module.k_proj_weight
    found = []
    for one, other in zip(query.double(), key.double(), strict=True):
        q, k = one @ weight_q.double().T, other @ weight_k.double().T
        if module.in_proj_bias is not None:
            q, k = q + module.in_proj_bias[:e].double(), k + module.in_proj_bias[e : 2 * e].double()
        if module.bias_k is not None:
            k = torch.cat([k, module.bias_k.double().reshape(1, e)])
        for head in range(module.num_heads):
            part = slice(head * size, (head + 1) * size)
            found.append((list(q[:, part]), list(k[:, part])))
    return found


def largest_logit(heads: list[tuple[Rows, Rows]]) -> float:
    """The largest q k / sqrt(d_head)."""
    return max(float(q @ k) / math.sqrt(len(q)) for queries, keys in heads for q in queries for k in keys)


def bound(heads: list[tuple[Rows, Rows]], num_heads: int) -> float:
    """max|q| max|k| / sqrt(d_head) over the whole batch, of the head where that is largest."""
    products = []
    for head in range(num_heads):
        mine = heads[head::num_heads]
        longest_q = max(math.hypot(*q.tolist()) for queries, _ in mine for q in queries)
        longest_k = max(math.hypot(*k.tolist()) for _, keys in mine for k in keys)
        products.append(longest_q * longest_k / math.sqrt(len(mine[0][0][0])))
    return max(products)


def _normed(rows: Tensor, norm: nn.RMSNorm | None) -> Rows:
    if norm is None:
        return list(rows)
    eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
    return [row / (row.square().mean() + eps).sqrt() * norm.weight.double() for row in rows]
