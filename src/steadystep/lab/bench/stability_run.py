"""One run of the stability study: a small transformer on English, with some measures against divergence or none."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from steadystep.errors import TrainingHalted
from steadystep.guard import Guard
from steadystep.init import initialise_
from steadystep.lab.gpt import GPT, GPTParts, GPTSize
from steadystep.lab.tasks.evaluating import evaluating
from steadystep.lab.text import TopicsText
from steadystep.schedule import warmup

SIZE = GPTSize(num_layers=6)
LR, MOMENTUM = 0.5, 0.9
MAX_NORM = 1.0
WARMUP_SHARE = 0.2
BATCH_SIZE = 8
LOOK_EVERY = 10


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How it went."""

    held_out: float
    """In nats per byte, after the last step; NaN when the weights are lost."""
    curve: tuple[tuple[int, float], ...]
    """(step, held-out loss) at every tenth step, on fewer windows; it ends where the weights are lost."""
    seconds: float
    """Of the processor, without the looking."""
    interventions: int = 0
    """Updates that the guard did not simply take."""


def plain(seed: int, *, num_steps: int, clip: bool, warm: bool) -> Run:
    """The loop as anybody writes it."""
    torch.manual_seed(seed)
    model = GPT(SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    rise = max(1, round(WARMUP_SHARE * num_steps))
    scheduler = LambdaLR(optimizer, warmup(rise)) if warm else None

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model.loss(batch).backward()  # type: ignore[no-untyped-call]
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    return _trained(model, step, seed=seed, num_steps=num_steps)


def guarded(seed: int, *, num_steps: int) -> Run:
    """What steadystep has to prevent it: qk-norm, GPT-2's first weights, and the guard with clip and schedule."""
    torch.manual_seed(seed)
    model = GPT(SIZE, GPTParts(attention="stable"))
    initialise_(model, "gpt2", seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    settings: dict[str, Any] = {
        "max_grad_norm": MAX_NORM,
        "lr_scheduler": "cosine",
        "warmup_steps": WARMUP_SHARE,
        "total_steps": num_steps,
    }
    interventions = 0
    with Guard(model, optimizer, config={"training": settings}) as guard:

        def step(batch: Tensor) -> None:
            nonlocal interventions
            interventions += not guard.step(model.loss, batch=batch).plan.proceeds

        run = _trained(model, step, seed=seed, num_steps=num_steps)
    return replace(run, interventions=interventions)


def _trained(model: GPT, step: Callable[[Tensor], object], *, seed: int, num_steps: int) -> Run:
    text = TopicsText(context=SIZE.context, batch_size=BATCH_SIZE, seed=seed)
    few, all_windows = text.held_out(64), text.held_out()
    curve = [(0, _held_out(model, few))]
    seconds = 0.0
    try:
        for index in range(1, num_steps + 1):
            batch = text.batch()
            began = time.process_time()
            step(batch)
            seconds += time.process_time() - began
            if index % LOOK_EVERY == 0:
                curve.append((index, _held_out(model, few)))
                if not math.isfinite(curve[-1][1]):
                    break  # lost: a NaN in the weights stays
    except TrainingHalted:
        pass
    return Run(held_out=_held_out(model, all_windows), curve=tuple(curve), seconds=seconds)


def _held_out(model: GPT, windows: Tensor) -> float:
    with evaluating(model):
        return float(model.loss(windows))
