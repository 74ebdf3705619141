"""An embedding table pushed to norm 64 and beyond, plain and bounded.

A one-layer attention model without norm layers learns to repeat the token before last. After 100 healthy steps every
row of its embedding table is set to a given norm, as a burst of bad updates would leave it, and training goes on. The
plain table feeds those rows to the attention; `BoundedEmbedding` does not, and is otherwise the same. A second table
does the same damage by training: the embedding's own learning rate is multiplied. Run:

    python benchmarks/bounded_embedding.py           # under a minute on one core
    python benchmarks/bounded_embedding.py --json    # for a program
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.layers import BoundedEmbedding, StableAttention, peak_logits

TOKENS, WIDTH, HEADS, TIME, BATCH = 32, 32, 4, 12, 32
MAX_NORM = 4.0
STEPS = 200
NORMS = (4, 16, 64, 256, 1024)
LR_MULTIPLES = (1, 100, 10_000)
Table = Callable[[], nn.Embedding]
TABLES: dict[str, Table] = {
    "nn.Embedding": lambda: nn.Embedding(TOKENS, WIDTH),
    "BoundedEmbedding": lambda: BoundedEmbedding(TOKENS, WIDTH, max_norm=MAX_NORM),
}


class Run(NamedTuple):
    """How it ended."""

    row_norm: float
    peak_logit: float
    loss: float
    fp16_finite: bool
    """Attention written out in fp16: a product beyond 65504 makes its softmax NaN."""


class Model(nn.Module):
    """Tokens and positions, attention, a head; no norm layer that could hide the trouble."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.tokens = table()
        self.positions = nn.Embedding(TIME, WIDTH)
        self.attention = StableAttention(WIDTH, HEADS, qk_norm=False, causal=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def embed(self, x: Tensor) -> Tensor:
        """What the attention sees."""
        found: Tensor = self.tokens(x) + self.positions.weight
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Logits over the token before last."""
        stream = self.embed(x)
        logits: Tensor = self.head(stream + self.attention(stream))
        return logits


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randint(TOKENS, (BATCH, TIME + 2), generator=generator)
    return x[:, 2:], x[:, :-2]


def train(model: Model, optimizer: torch.optim.Optimizer, steps: int, generator: torch.Generator) -> float:
    losses = []
    for _ in range(steps):
        x, y = batch(generator)
        loss = functional.cross_entropy(model(x)[:, 2:].flatten(0, 1), y[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / len(losses[-20:])


@torch.no_grad()
def looked_at(model: Model, loss: float, generator: torch.Generator) -> Run:
    x, _ = batch(generator)
    stream = model.embed(x)
    norm = model.tokens(torch.arange(TOKENS)).norm(dim=1).max().item()
    peak = peak_logits(model.attention, stream).max().item()
    q, k = (part.half() for part in model.attention.queries_and_keys(stream))
    weights = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)).softmax(dim=-1)
    return Run(norm, peak, loss, bool(weights.isfinite().all()))


def pushed(table: Table, norm: float) -> Run:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model(table)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, optimizer, 100, generator)
    with torch.no_grad():
        weight = model.tokens.weight
        weight.mul_(norm / weight.norm(dim=1, keepdim=True))
    loss = train(model, optimizer, STEPS, generator)
    return looked_at(model, loss, generator)


def overtrained(table: Table, multiple: float) -> Run:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model(table)
    rest = [p for n, p in model.named_parameters() if n != "tokens.weight"]
    groups: list[dict[str, Any]] = [{"params": [model.tokens.weight], "lr": 3e-2 * multiple}, {"params": rest}]
    loss = train(model, torch.optim.SGD(groups, lr=3e-2, momentum=0.9), STEPS, generator)
    return looked_at(model, loss, generator)


def show(title: str, results: dict[str, dict[str, Run]]) -> None:
    print(f"{title:<24} {'table':<17} {'row norm':>9} {'peak logit':>11} {'loss':>8}  softmax in fp16")
    for case, runs in results.items():
        for name, run in runs.items():
            verdict = "finite" if run.fp16_finite else "NaN"
            print(f"{case:<24} {name:<17} {run.row_norm:9.3g} {run.peak_logit:11.3g} {run.loss:8.3g}  {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    by_hand = {f"pushed to {n}": {name: pushed(t, n) for name, t in TABLES.items()} for n in NORMS}
    by_training = {f"SGD, lr x {m}": {name: overtrained(t, m) for name, t in TABLES.items()} for m in LR_MULTIPLES}
    if options.json:
        print(json.dumps({c: {n: r._asdict() for n, r in runs.items()} for c, runs in (by_hand | by_training).items()}))
    else:
        print(f"max_norm {MAX_NORM:g}; loss of guessing: {math.log(TOKENS):.2f}")
        show("table pushed by hand", by_hand)
        show("table pushed by training", by_training)
    return 0


if __name__ == "__main__":
    sys.exit(main())
