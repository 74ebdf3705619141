"""Loops around other people's tools, written as their documents say."""

import contextlib
import io
from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim import Optimizer

from steadystep.lab.bench.faulty_run import BatchLoss, Stopped, Tick
from steadystep.lab.tasks import Task

Before = Callable[[torch.Tensor], tuple[str, ...] | None]
"""Between backward and update; None means that the update is not taken."""


After = Callable[[torch.Tensor], None]


def _nothing(*_: Any) -> None:
    return None


@final
class Loop:
    """zero_grad, backward, whatever the tool does, update."""

    def __init__(
        self,
        task: Task,
        *,
        optimizer: Optimizer | None = None,
        before: Before = lambda loss: (),
        update: Callable[[], bool] | None = None,
        after: After = _nothing,
        penalty: Callable[[], float] = lambda: 1.0,
        close: Callable[[], Any] = _nothing,
    ) -> None:
        self.model, self.optimizer = task.model, optimizer or task.optimizer
        self._before, self._update, self._after = before, update, after
        self._penalty, self._close = penalty, close
        self._taken = 0

    def step(self, work: BatchLoss, batch: Any) -> Tick:
        """One batch. The tool's cut of the learning rate comes on top of what the loop (or the fault) has set."""
        given = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad()
        loss = work(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                did = self._before(loss)
                taken = did is not None and self._take(given)
        finally:
            self._set_lr(given)
        self._taken += taken
        self._after(loss.detach())
        return Tick(loss=loss.item(), did=(did or ()) if taken else ("skip",))

    def _take(self, given: float) -> bool:
        self._set_lr(given * self._penalty())
        if self._update is not None:
            return self._update()
        self.optimizer.step()
        return True

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @property
    def updates(self) -> int:
        """As Adam counts them, which goes back with a rollback; under SGD those that were taken."""
        kept = [slots for slots in self.optimizer.state.values() if isinstance(slots, dict)]  # some keep plain counters
        counts = [int(slots["step"]) for slots in kept if "step" in slots]
        return min(max(counts), self._taken) if counts else self._taken

    def close(self) -> None:
        """Let the tool go."""
        self._close()


def stop(why: str) -> None:
    """End a run as its tool says it should."""
    raise Stopped(why)
