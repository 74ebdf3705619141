"""What was possible: the runs of `steadystep bench recovery` without the batches that the fault destroyed.

    python benchmarks/oracle.py --seeds 903-905      adds what is missing to benchmarks/results/oracle.jsonl

A plain program, in torch alone: the tasks are written here once more, and nothing of the library is imported. Each run
takes as many steps of the loop as the faulty one; a destroyed batch is drawn and not used. `steadystep bench recovery`
reads the rows, and compares the runs without a destroyed batch with its own clean ones: they must agree to the bit.
"""

import argparse
import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

NUM_STEPS, NUM_SLOW_STEPS = 480, 640
SCORED, EVERY = 5, 10  # the score is the mean held-out loss at the last five tens of steps
DESTROYED = (0, 1, 3, 5, 20)  # batches in a row, from the first step of the fault on
STORE = Path("benchmarks/results/oracle.jsonl")


@dataclass(frozen=True)
class Task:
    """A model, its optimizer, its batches and its losses."""

    model: nn.Module
    optimizer: Optimizer
    batch: Callable[[], Any]
    loss: Callable[[Any], Tensor]
    tests: Any


class Block(nn.Module):
    """Attention and an MLP, pre-LN."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attn_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(self.attn_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_out(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 2, context: int = 32) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(_init)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] of bytes to logits over the next one."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class LSTM(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.cells = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] of bytes to logits over the next one."""
        logits: Tensor = self.head(self.cells(self.bytes(tokens))[0])
        return logits


def _text(model: nn.Module, optimizer: Optimizer, *, context: int, seed: int) -> Task:
    data = torch.tensor(list("\n".join(topics.topics.values()).encode()), dtype=torch.long)
    split, window = len(data) * 9 // 10, context + 1

    def windows(text: Tensor, count: int, rng: torch.Generator) -> Tensor:
        starts = torch.randint(len(text) - window, (count,), generator=rng)
        return text[starts[:, None] + torch.arange(window)]

    def loss(text: Tensor) -> Tensor:
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    rng = torch.Generator().manual_seed(seed)
    tests = windows(data[split:], 256, torch.Generator().manual_seed(0))
    return Task(model, optimizer, lambda: windows(data[:split], 8, rng), loss, tests)


def gpt(seed: int) -> Task:
    """Two layers of width 32, AdamW."""
    torch.manual_seed(seed)
    model = GPT()
    return _text(model, AdamW(model.parameters(), lr=3e-3), context=32, seed=seed)


def rnn(seed: int) -> Task:
    """An LSTM of width 32, Adam."""
    torch.manual_seed(seed)
    model = LSTM()
    return _text(model, Adam(model.parameters(), lr=5e-3), context=24, seed=seed)


def clusters(seed: int) -> Task:
    """Ten classes of three clusters each; BatchNorm, dropout, SGD."""
    torch.manual_seed(seed)
    first = [nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*first, nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    centres = torch.randn(30, 32, generator=torch.Generator().manual_seed(12345))

    def draw(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        which = torch.randint(30, (count,), generator=rng)
        return centres[which] + 1.5 * torch.randn(count, 32, generator=rng), which % 10

    rng = torch.Generator().manual_seed(seed)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    tests = draw(2000, torch.Generator().manual_seed(-1))
    return Task(model, optimizer, lambda: draw(64, rng), lambda b: functional.cross_entropy(model(b[0]), b[1]), tests)


def regression(seed: int) -> Task:
    """A smooth function without noise; tanh, Adam."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def draw(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8, generator=rng)
        return x, torch.sin(x[:, :1] * 1.5) + x[:, 1:2] * x[:, 2:3] + 0.5 * x[:, 3:4]

    rng = torch.Generator().manual_seed(seed)
    tests = draw(2000, torch.Generator().manual_seed(-1))
    optimizer = Adam(model.parameters(), lr=3e-3)
    return Task(model, optimizer, lambda: draw(64, rng), lambda b: functional.mse_loss(model(b[0]), b[1]), tests)


TASKS = {"gpt": gpt, "clusters": clusters, "regression": regression, "rnn": rnn}


def first_step(seed: int) -> int:
    """When the fault begins."""
    return 200 + 10 * (seed % 10)


def score(task: Task, *, num_steps: int, without: tuple[int, ...] = (), fp16: bool = False) -> float:
    """Train without these batches; the mean of the last five held-out losses."""
    scaler, held_out = torch.amp.GradScaler("cpu", enabled=fp16), []
    for step in range(num_steps):
        batch = task.batch()
        if step in without:
            continue
        task.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=fp16):
            loss = task.loss(batch)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(task.optimizer)
        scaler.update()
        left = num_steps - 1 - step
        if left % EVERY == 0 and left < SCORED * EVERY:
            held_out.append(_held_out(task))
    return sum(held_out) / SCORED if len(held_out) == SCORED else math.nan


def _held_out(task: Task) -> float:
    task.model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        loss = float(task.loss(task.tests))
    task.model.train()
    return loss


def wanted(seed: int) -> Iterator[dict[str, Any]]:
    """The runs of one seed: without the destroyed batches, and for the spread without one more."""
    start = first_step(seed)
    for name in TASKS:
        base = {"task": name, "seed": seed, "num_steps": NUM_STEPS, "precision": "fp32", "destroyed": 0, "more": None}
        yield from (base | {"destroyed": count} for count in DESTROYED)
        yield from (base | {"more": step} for step in (start, start + 7, start + 20, start + 60, 50, 120))
        yield from (base | {"destroyed": 20, "more": start + later} for later in (21, 27, 40, 60, 80, 100))
        yield base | {"num_steps": NUM_SLOW_STEPS}
        if name in ("clusters", "regression"):
            yield from (base | {"precision": "fp16", "destroyed": count} for count in (0, 3, 20))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The row of one run."""
    start = first_step(job["seed"])
    without = [*range(start, start + job["destroyed"]), *([] if job["more"] is None else [job["more"]])]
    task = TASKS[job["task"]](job["seed"])
    made = score(task, num_steps=job["num_steps"], without=tuple(without), fp16=job["precision"] == "fp16")
    return job | {"kind": "oracle", "score": made}


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one run from another."""
    return tuple(row[name] for name in ("task", "seed", "num_steps", "precision", "destroyed", "more"))


def main() -> None:
    """Run what is not stored yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="903-905", help="one, or the first and the last of a range")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--out", type=Path, default=STORE)
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    stored = given.out.read_text(encoding="utf-8").splitlines() if given.out.is_file() else []
    done = {key(json.loads(line)["row"]) for line in stored}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("a", encoding="utf-8") as out:
        for job in (job for seed in range(int(first), int(last or first) + 1) for job in wanted(seed)):
            if job["task"] in given.tasks and key(job) not in done:
                out.write(json.dumps({"row": run(job)}) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
