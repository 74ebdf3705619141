"""Language models of a few thousand weights: minGPT's adder, nanoGPT and makemore's MLP over invented words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.seen.tasks import generators
from tests.seen.twins import Drive

LETTERS = 20
Pair = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention and MLP, normalised before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.one(x)).chunk(3, 2))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.two(x))


class GPT(nn.Module):
    """Two blocks, weights as GPT-2 begins with them."""

    def __init__(self, vocabulary: int, context: int, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, 2) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * layers) if name.endswith("out.weight") else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1]))))


def cross_entropy(model: nn.Module, batch: Pair) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten(), ignore_index=-1)


@dataclass(frozen=True)
class Adder:
    """minGPT's projects/adder: two digits plus two digits, sum written backwards, AdamW 5e-4 (0.9, 0.95), clip 1.0."""

    steps: int = 700
    digits: int = 2
    size: int = 32

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        model = GPT(10, 3 * self.digits)
        decayed = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.95))
        val = self._sums(512, held)
        drive.ends(lambda: cross_entropy(model, val).item(), model)
        update = drive.over(model, optimizer, clip=1.0)
        for _ in range(self.steps):
            update(lambda b: cross_entropy(model, b), self._sums(self.size, rng))

    def _sums(self, count: int, rng: torch.Generator) -> Pair:
        a, b = torch.randint(10**self.digits, (2, count), generator=rng)
        shown = [a // 10**i % 10 for i in reversed(range(self.digits))] + [
            b // 10**i % 10 for i in reversed(range(self.digits))
        ]
        row = torch.stack([*shown, *((a + b) // 10**i % 10 for i in range(self.digits + 1))], 1)
        y = row[:, 1:].clone()
        y[:, : 2 * self.digits - 1] = -1  # only the sum is asked for
        return row[:, :-1], y


def corpus(length: int, rng: torch.Generator) -> Tensor:
    """Letters of 60 invented words; each word prefers a few successors, and 0 is the space."""
    fixed = torch.Generator().manual_seed(4)
    words = [torch.randint(1, LETTERS, (int(n),), generator=fixed) for n in torch.randint(2, 7, (60,), generator=fixed)]
    after = torch.randint(60, (60, 4), generator=fixed)
    letters: list[Tensor] = []
    word, count, draws = 0, 0, torch.randint(4, (length,), generator=rng).tolist()
    for draw in draws:
        letters += [words[word], torch.zeros(1, dtype=torch.long)]
        count += len(words[word]) + 1
        word = int(after[word, draw])
        if count >= length:
            break
    return torch.cat(letters)[:length]


class CharMLP(nn.Module):
    """makemore's MLP: eight letters, embedded side by side, tanh, next letter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.hidden, self.head = nn.Embedding(LETTERS, 10), nn.Linear(80, 100), nn.Linear(100, LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.tokens(x).flatten(1))))


@dataclass(frozen=True)
class CharModel:
    """nanoGPT (AdamW 1e-3, clip 1.0, 32 letters) or makemore (SGD 0.1, 8 letters); some labels are shuffled."""

    kind: str = "nanogpt"
    shuffled: Sequence[int] = ()
    steps: int = 600

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, held = generators(seed)
        text, val = corpus(20_000, rng), corpus(4_000, held)
        gpt = self.kind == "nanogpt"
        model: nn.Module = GPT(LETTERS, 32) if gpt else CharMLP()
        if gpt:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        take = _windows if gpt else _eights
        val_batch = take(val, 256, held)
        drive.ends(lambda: cross_entropy(model, val_batch).item(), model)
        update = drive.over(model, optimizer, clip=1.0 if gpt else None)
        for step in range(self.steps):
            x, y = take(text, 16 if gpt else 32, rng)
            if step in self.shuffled:
                order = torch.randperm(y.numel(), generator=torch.Generator().manual_seed(step))
                y = y.flatten()[order].reshape(y.shape)
            update(lambda b: cross_entropy(model, b), (x, y))


def _windows(text: Tensor, count: int, rng: torch.Generator) -> Pair:
    at = torch.randint(len(text) - 33, (count, 1), generator=rng) + torch.arange(33)
    return text[at][:, :-1], text[at][:, 1:]


def _eights(text: Tensor, count: int, rng: torch.Generator) -> Pair:
    at = torch.randint(len(text) - 9, (count, 1), generator=rng) + torch.arange(9)
    return text[at][:, :-1], text[at][:, -1]
