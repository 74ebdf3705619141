"""Three ranks, real processes over gloo: one of them with other settings, another model, or trouble of its own.

    python benchmarks/attacks/ranks.py --seed 0 --out build/attacks/ranks.jsonl

Passed, other settings: every rank raises the same error when its guard is made, and it names what differs. Passed,
trouble on one rank: no rank waits for another, all take the same decisions, and all end with the same finite weights;
a weight that only one rank holds otherwise is copied from another, without a rollback. A rank that waits for more than
30 seconds ends the study.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from table import Rows, arguments
from torch import Tensor, nn

import steadystep

RANKS, STEPS = 3, 44
Case = tuple[str, str, Callable[[int, Path], dict[str, Any]], str]
"""What is attacked, how, what `run` is given on a rank, and what every rank should say; "" where it should go on."""


class Net(nn.Module):
    """Small, with running statistics."""

    def __init__(self, *, width: int = 8, mask: int = 4, deep: bool = False) -> None:
        super().__init__()
        layers = [nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1)]
        self.body = nn.Sequential(*layers, *([nn.Linear(1, 1)] if deep else []))
        self.register_buffer("mask", torch.ones(mask))

    def forward(self, x: Tensor) -> Tensor:
        """Of a batch."""
        return self.body(x)  # type: ignore[no-any-return]


def run(
    rank: int,
    *,
    training: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    optimizer: str = "AdamW",
    options: dict[str, Any] | None = None,
    spoil: Callable[[int, Tensor, nn.Module, torch.optim.Optimizer], Tensor | None] | None = None,
    detectors: tuple[Any, ...] = (),
    **settings: Any,
) -> dict[str, Any]:
    """One short program on this rank: what it said, what it decided, what it ended with."""
    torch.manual_seed(0)
    other = Net(**(model or {}))
    wrapped: nn.Module = other if model else nn.parallel.DistributedDataParallel(other)
    made = getattr(torch.optim, optimizer)(wrapped.parameters(), **({"lr": 0.01} | (options or {})))
    run_dir = settings.pop("run_dir", None)
    config = {"training": training or {}, "monitoring": {"sinks": []}} | settings
    decided: list[Any] = []
    try:
        guard = steadystep.Guard(wrapped, made, config=config, run_dir=run_dir, detectors=detectors)
    except steadystep.errors.SteadystepError as error:
        return {"said": str(error)}
    for step in range(STEPS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
        changed = spoil(step, x, other, made) if spoil else None
        x = x if changed is None else changed
        try:
            outcome = guard.step(lambda x: (wrapped(x) - x.sum(1, keepdim=True)).square().mean(), batch=x)
        except steadystep.TrainingHalted as error:
            return {"said": f"halted: {error}"}
        decided.append((outcome.stepped, outcome.plan.actions, outcome.restored))
    with suppress(Exception):
        guard._end(save=False)
    weights = [p.detach().double().sum().item() for p in other.parameters()]
    return {"said": "", "decided": repr(decided), "weights": repr(weights), "finite": all(map(_is_finite, weights))}


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def cases(seed: int) -> Iterator[Case]:
    """Every one of them; the seed chooses the rank and the step."""
    rng = torch.Generator().manual_seed(seed)

    def drawn(most: int) -> int:
        return int(torch.randint(most, (), generator=rng))

    def only(odd: int, **given: Any) -> Callable[[int, Path], dict[str, Any]]:
        return lambda rank, folder: given if rank == odd else {}

    for key, value in {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "max_grad_value": 0.1,
        "clip_rule": "zscore",
        "mixed_precision": "bf16",
        "lr_scheduler": "cosine",
        "total_steps": 77,
        "learning_rate": 0.02,
        "auto_recovery": False,
        "stability_monitoring": False,
        "early_stopping": True,
        "max_recovery_attempts": 1,
    }.items():
        yield "settings", f"training.{key}: {value}", only(drawn(RANKS), training={key: value}), f"training.{key} is"
    for mode in ("observe", "careful"):
        yield "settings", f"mode: {mode}", only(drawn(RANKS), mode=mode), "mode is"
    for key, value in {"max_skips": 3, "trust_steps": 5, "snapshots": 0, "skip_batches": False}.items():
        yield "settings", f"recovery.{key}: {value}", only(drawn(RANKS), recovery={key: value}), f"recovery.{key} is"
    wide = {"sinks": [], "loss_window_size": 64}
    yield "settings", "monitoring.loss_window_size", only(drawn(RANKS), monitoring=wide), "loss_window_size is"
    yield "settings", "an unknown key", only(drawn(RANKS), training={"max_gradnorm": 1.0}), "unknown key"
    saves = {"sinks": [], "save_checkpoints": True}
    yield "settings", "checkpoints without a folder", only(drawn(RANKS), monitoring=saves), ""
    yield (
        "settings",
        "another log_frequency, which is allowed",
        only(2, monitoring={"sinks": [], "log_frequency": 7}),
        "",
    )
    for name, given in {
        "lr": {"lr": 0.02},
        "betas": {"betas": (0.8, 0.9)},
        "weight_decay": {"weight_decay": 0.5},
    }.items():
        yield "optimizer", name, only(drawn(RANKS), options=given), f"group 0 {name} is"
    yield "optimizer", "another kind", only(drawn(RANKS), optimizer="RAdam"), "kind is"

    def built(odd: int, **given: Any) -> Callable[[int, Path], dict[str, Any]]:
        return lambda rank, folder: {"model": given if rank == odd else {"width": 8}}

    yield "model", "another width", built(drawn(RANKS), width=9), "body.0.weight is"
    yield "model", "one layer more", built(drawn(RANKS), deep=True), "body.4.weight is missing"
    yield "model", "a buffer of another shape", built(drawn(RANKS), mask=5), "mask is"

    def trouble(spoil: Any, *, odd: int | None = None) -> Callable[[int, Path], dict[str, Any]]:
        return lambda rank, folder: {"spoil": spoil} if odd is None or rank == odd else {}

    for value in ("nan", "inf", "1e38"):
        for odd in range(RANKS):
            at = 5 + drawn(30)

            def bad_input(step: int, x: Tensor, m: Any, o: Any, at: int = at, value: str = value) -> Tensor | None:
                return x.fill_(float(value)) if step == at else None

            yield "trouble", f"{value} in a batch of rank {odd} at step {at}", trouble(bad_input, odd=odd), ""
    for odd in range(RANKS):
        at = 5 + drawn(10)

        def flipped(step: int, x: Tensor, model: nn.Module, o: Any, at: int = at) -> None:
            if step == at:
                with torch.no_grad():
                    model.body[0].weight[0, 0] += 1.0  # type: ignore[index, union-attr]

        yield "trouble", f"a weight of rank {odd} changed at step {at}", trouble(flipped, odd=odd), ""

        def broken(step: int, x: Tensor, model: nn.Module, o: Any, at: int = at) -> None:
            if step == at:
                with torch.no_grad():
                    model.body[3].bias.fill_(float("nan"))  # type: ignore[index, union-attr]

        yield "trouble", f"a NaN weight on rank {odd} at step {at}", trouble(broken, odd=odd), ""

        def buffer(step: int, x: Tensor, model: nn.Module, o: Any, at: int = at) -> None:
            if step == at:
                model.body[1].running_var.fill_(float("inf"))  # type: ignore[index, union-attr]

        yield "trouble", f"an infinite buffer on rank {odd} at step {at}", trouble(buffer, odd=odd), ""

    for hit in (0, 1, 2, None):
        at, value = 22 + drawn(12), ("nan", "1e38")[drawn(2)]

        def moment(step: int, x: Tensor, m: Any, o: Any, at: int = at, value: str = value) -> None:
            if step == at:
                next(iter(o.state.values()))["exp_avg"].view(-1)[0] = float(value)

        where = "on every rank" if hit is None else f"on rank {hit}"
        yield "trouble", f"a moment of {value} {where} at step {at}", trouble(moment, odd=hit), ""


def judged(every: list[dict[str, Any]], says: str) -> str:
    """What was wrong with a case, or ""."""
    said = {each["said"] for each in every}
    if any(text.startswith("halted") for text in said):
        return "" if len(said) == 1 and not says else f"halted: {said}"
    if says or any(said - {""}):
        if "" in said or any(says not in text for text in said):
            return f"expected {says!r} everywhere: {said}"
        # the rank with a mistake says it in its own words, the others say whose it is
        own = [text for text in said if "cannot create its guard" not in text]
        return "" if len(said) == 1 or (len(said) == 2 and len(own) == 1) else str(said)
    for key in ("decided", "weights"):
        if len({each[key] for each in every}) > 1:
            return f"{key} differ: {[each[key][-200:] for each in every]}"
    return "" if all(each["finite"] for each in every) else "weights are not finite"


def work(out: Path, seed: int) -> None:
    """On every rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder, out.open("w") if rank == 0 else open(os.devnull, "w") as file:
        for group, name, given, says in cases(seed):
            mine: dict[str, Any]
            try:
                mine = run(rank, **given(rank, Path(folder)))
            except Exception as error:
                mine = {"said": f"{type(error).__name__}: {error}", "decided": "", "weights": "", "finite": False}
            every: list[Any] = [None] * RANKS
            dist.all_gather_object(every, mine)
            wrong = judged(every, says)
            if not wrong and name.startswith("a weight of rank") and "copy-replica" not in every[0]["decided"]:
                wrong = f"it was not copied from a healthy rank: {every[0]['decided'][:300]}"
            if not wrong and name.startswith("a weight of rank") and "rollback" in every[0]["decided"]:
                wrong = "there was a rollback"
            print(json.dumps([group, name, wrong, every[0]["said"]]), file=file, flush=True)
    dist.destroy_process_group()


def main() -> int:
    if "RANK" in os.environ:
        work(Path(sys.argv[1]), int(sys.argv[2]))
        return 0
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder, Rows(options.out) as rows:
        found = Path(folder) / "rows.jsonl"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [sys.executable, *launch, __file__, str(found), str(options.seed)]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        lines = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
        for group, name, wrong, said in lines:
            rows.add(group, name, passed=not wrong, said=wrong or said)
        for group, name, *_ in list(cases(options.seed))[len(lines) :]:
            rows.add(group, name, passed=False, said="the study ended before it: " + done.stderr[-300:])
    return rows.finish()


if __name__ == "__main__":
    sys.exit(main())
