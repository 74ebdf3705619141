"""What checkpoints cost: 50 steps with one checkpoint ÷ 50 plain steps, interleaved in one process.

A block is 50 steps. Blocks of plain, saving and plain-again steps alternate; a ratio is the saving block ÷ the mean of
its two plain neighbours, and the noise floor is the same with a third plain loop in the saving place. The saving block
ends only when the disk has the checkpoint, so nothing of its cost is left to the next. "Processor time" is the same
ratio in time spent on any core, the writing thread's too: what a machine pays whose cores are all busy. Run:

    python benchmarks/checkpointing.py                    # a GPT with 10M parameters
    python benchmarks/checkpointing.py --model mlp        # 10M parameters with much cheaper steps: the hard case
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from steadystep.checkpoints.store import BackgroundWriter, CheckpointStore
from steadystep.lab.bench.overhead import never_trim_the_heap, seconds
from steadystep.lab.bench.overhead_steps import Setup, TimedStep, mlp, plain_step
from steadystep.lab.tasks.text import GPT, GPTSize

EVERY = 50


def gpt() -> Setup:
    model = GPT(GPTSize(d_model=384, num_layers=6, num_heads=6, context=64))
    text = torch.randint(256, (4, 65))
    return model, lambda: model.loss(text)


MODELS: dict[str, Callable[[], Setup]] = {"gpt": gpt, "mlp": lambda: mlp(1792, batch_size=64)}


@dataclass
class Saving:
    """A plain loop that saves everything at the beginning of each block of `EVERY` steps."""

    setup: Setup
    writer: BackgroundWriter
    waits: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model, compute = self.setup
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        parameters = list(self.model.parameters())
        self.steps = 0

        def step() -> float:
            self.optimizer.zero_grad()
            loss = compute()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            self.optimizer.step()
            self.steps += 1
            return loss.item()

        self.step: TimedStep = step

    def block(self) -> tuple[float, float]:
        """Seconds by the clock and of processor time for `EVERY` steps, one checkpoint among them."""
        started, busy = time.perf_counter(), time.process_time()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.writer.save(state, step=self.steps, updates=self.steps)
        self.waits.append(time.perf_counter() - started)
        for _ in range(EVERY):
            self.step()
        late = time.perf_counter()
        self.writer.flush()
        self.writes.append(time.perf_counter() - late)
        return time.perf_counter() - started, time.process_time() - busy


def plain_block(step: TimedStep) -> tuple[float, float]:
    busy = time.process_time()
    return seconds(step, EVERY), time.process_time() - busy


def against(middle: tuple[float, float], *neighbours: tuple[float, float]) -> tuple[float, float]:
    clock, busy = (sum(values) / len(values) for values in zip(*neighbours, strict=True))
    return middle[0] / clock, middle[1] / busy


def spread(name: str, ratios: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {name: middle, f"{name} low": low, f"{name} high": high}


def measure(make: Callable[[], Setup], folder: Path, *, blocks: int) -> dict[str, float]:
    def fresh() -> Setup:
        torch.manual_seed(0)
        return make()

    first, second, third = (plain_step(fresh()) for _ in range(3))
    saving = Saving(fresh(), BackgroundWriter(CheckpointStore(folder)))
    for step in (first, second, third, saving.step):
        seconds(step, 3)
    saving.block()  # allocates the buffers
    first_wait = saving.waits.pop()
    found, noise = [], []
    for _ in range(blocks):
        before, middle = plain_block(first), saving.block()
        between, again, after = plain_block(second), plain_block(third), plain_block(first)
        found.append(against(middle, before, between))
        noise.append(against(again, between, after))
        told = [f"{ratio:.3f}" for ratio in (*found[-1], *noise[-1])]
        print("  saving/plain {} cpu {}   plain/plain {} cpu {}".format(*told), file=sys.stderr, flush=True)
    newest = CheckpointStore(folder).newest()
    assert newest is not None
    return {
        "parameters": sum(p.numel() for p in saving.model.parameters()),
        "megabytes": sum(file.stat().st_size for file in newest.path.iterdir()) / 1e6,
        **spread("clock saving/plain", [clock for clock, _ in found]),
        **spread("clock plain/plain", [clock for clock, _ in noise]),
        **spread("processor saving/plain", [busy for _, busy in found]),
        **spread("processor plain/plain", [busy for _, busy in noise]),
        "step_ms": seconds(first, 5) / 5 * 1e3,
        "wait_ms": statistics.median(saving.waits) * 1e3,
        "first_wait_ms": first_wait * 1e3,
        "left_at_the_end_ms": statistics.median(saving.writes) * 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--blocks", type=int, default=7, help="alternations (default 7)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure (default: a temporary folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    never_trim_the_heap()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        r = measure(MODELS[options.model], Path(folder), blocks=options.blocks)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "threads": options.threads, **r}, indent=2))
        return 0
    print(
        f"{r['parameters'] / 1e6:.1f}M parameters, {r['megabytes']:.0f} MB every {EVERY} steps of {r['step_ms']:.0f} ms"
    )
    for name in (key.removesuffix(" low") for key in r if key.endswith(" low")):
        print(f"{name:<23} {r[name]:.3f} (quartiles {r[f'{name} low']:.3f} to {r[f'{name} high']:.3f})")
    print(f"the training thread waits {r['wait_ms']:.0f} ms per checkpoint; the first time {r['first_wait_ms']:.0f} ms")
    print(f"still to be written after {EVERY} steps: {r['left_at_the_end_ms']:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
