"""What log and sinks cost: the same guarded step with run log and TensorBoard, and with neither, interleaved.

Blocks of watched and bare steps alternate in one process. The wall-clock ratio is the median over blocks; its noise is
the same statistic between two bare guards. Because the machine may be busy with other things, processor time is
measured too: of the training thread (what the loop itself pays) and of the whole process (with the sinks' thread), and
directly, of recording alone, which is the number to trust on a busy machine. A step is padded to 5 ms of arithmetic;
the model has 40 tensors. Run:

    python benchmarks/tracking.py            # one paragraph
    python benchmarks/tracking.py --json     # for a program
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import steadystep
from steadystep.records import Outcome, Signals
from steadystep.tracking import Broadcast, GradientSample, RunLog, RunStart, TensorBoard, Tracking

Step = Callable[[], object]
Times = tuple[float, float, float]


def guarded(run_dir: Path | None, *, tensors: int, work: int) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(tensors // 2)))
    x, filler = torch.randn(8, 32), torch.randn(work, work)
    monitoring: dict[str, Any] = {} if run_dir is not None else {"sinks": []}
    guard = steadystep.Guard(
        model, torch.optim.SGD(model.parameters(), lr=1e-4), run_dir=run_dir, config={"monitoring": monitoring}
    )

    def closure() -> torch.Tensor:
        (filler @ filler).sum()
        loss: torch.Tensor = model(x).square().mean()
        return loss

    return lambda: guard.step(closure)


def direct(run_dir: Path, *, tensors: int, steps: int = 4000) -> tuple[float, float]:
    """Microseconds of processor time per step that recording alone takes: of the caller, and of the sinks' thread."""
    names = tuple(f"blocks.{i}.attention.weight" for i in range(tensors))
    norms = tuple(0.123456789 + i for i in range(tensors))
    seen = [Signals(step=i, loss=2.0, grad_norm=1 / (i + 3), lr=1e-4, names=names, norms=norms) for i in range(steps)]
    outcomes = [Outcome(step=signals.step, reading=2.0, stepped=True, signals=signals) for signals in seen]
    values = {name: np.random.default_rng(0).normal(size=1024).astype(np.float32) for name in names[:32]}
    shown = Broadcast(
        [TensorBoard()], RunStart(name="run", run_dir=run_dir), every=10, layers_every=100, capacity=steps
    )
    tracking = Tracking(RunLog(run_dir, layers_every=100), shown)
    for outcome in outcomes[:200]:  # the beginning is shown in full
        tracking.record(outcome)
    while shown.waiting:
        time.sleep(0.1)
    before = time.thread_time(), time.process_time()
    for outcome in outcomes[200:]:
        tracking.record(outcome)
        if outcome.step % 1000 == 0:
            tracking.sampled(GradientSample(step=outcome.step, values=values))
    own = time.thread_time() - before[0]
    tracking.close()
    everything = time.process_time() - before[1]
    return own / (steps - 200) * 1e6, (everything - own) / (steps - 200) * 1e6


def measured(step: Step, repeats: int) -> Times:
    """Seconds of the wall clock, of this thread's processor time and of the whole process's."""
    before = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(repeats):
        step()
    after = time.perf_counter(), time.thread_time(), time.process_time()
    wall, thread, process = (b - a for a, b in zip(before, after, strict=True))
    return wall, thread, process


def ratios(candidate: Step, base: Step, *, blocks: int, repeats: int) -> tuple[list[Times], list[Times]]:
    ours: list[Times] = []
    bare: list[Times] = []
    for block in range(blocks):
        first, second = (candidate, base) if block % 2 else (base, candidate)
        one, other = measured(first, repeats), measured(second, repeats)
        ours.append(one if block % 2 else other)
        bare.append(other if block % 2 else one)
    return ours, bare


def compare(ours: list[Times], bare: list[Times]) -> dict[str, float]:
    found = {}
    for column, name in enumerate(("wall", "training_thread", "process")):
        each = [a[column] / b[column] for a, b in zip(ours, bare, strict=True)]
        found[name] = statistics.median(each)
        found[f"{name}_total"] = sum(a[column] for a in ours) / sum(b[column] for b in bare)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--blocks", type=int, default=40, help="pairs of blocks (default 40)")
    parser.add_argument("--repeats", type=int, default=50, help="steps in a block (default 50)")
    parser.add_argument("--tensors", type=int, default=40, help="parameters of the model (default 40)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="what a step is padded to (default 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = 64
        while True:  # until a step takes long enough, in processor time
            step = guarded(None, tensors=options.tensors, work=work)
            measured(step, 20)
            millis = measured(step, 20)[1] / 20 * 1e3
            if millis >= options.step_ms:
                break
            work = int(work * 1.15) + 1
        watched = guarded(Path(folder) / "run", tensors=options.tensors, work=work)
        bare, other = (guarded(None, tensors=options.tensors, work=work) for _ in range(2))
        for step in (watched, bare, other):
            measured(step, 120)  # the first 100 steps are shown in full, and TensorBoard is imported
        ours, base = ratios(watched, bare, blocks=options.blocks, repeats=options.repeats)
        again, noise = ratios(other, bare, blocks=options.blocks, repeats=options.repeats)
        own, sinks = direct(Path(folder) / "direct", tensors=options.tensors)
        size = (Path(folder) / "run" / "run.jsonl").stat().st_size
    result = {
        "torch": torch.__version__,
        "step_ms": millis,
        "steps": options.blocks * options.repeats,
        "log_bytes": size,
        "recording_us": own,
        "sinks_us": sinks,
        "watched_to_bare": compare(ours, base),
        "bare_to_bare": compare(again, noise),
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    watch, rest = compare(ours, base), compare(again, noise)
    print(f"a step of {millis:.1f} ms, {options.tensors} tensors, {result['steps']:,} steps, medians over blocks:")
    for name in ("wall", "training_thread", "process"):
        print(f"  {name:<16} with log and TensorBoard / without {watch[name]:.4f}   noise {rest[name]:.4f}")
    share = (own + sinks) / millis / 10
    print(
        f"  directly: {own:.1f} us a step in the training thread, {sinks:.1f} us in the sinks', {share:.2f} % of a step"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
