"""Out of memory: the same batch again, in smaller parts.

Halving the micro-batch and doubling the number of parts keeps the update what it was: with weights w_i the gradient of
sum(w_i * loss_i) is that of the mean loss over the whole batch, up to rounding. It is not where rows of a batch meet
each other, as in BatchNorm's statistics or a contrastive loss.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, final

import torch
from torch import Tensor, nn

from steadystep._utils.rng import RngState
from steadystep._utils.tensors import device_of
from steadystep._utils.text import warn
from steadystep.errors import MisuseError, TrainingHalted
from steadystep.memory import BatchPart, split_batch
from steadystep.snapshots.buffers import Buffers

Result = TypeVar("Result")
Split = Callable[[Any, int], Sequence[BatchPart]]
AgreeOnParts = Callable[[int], int]

_TEXTS = ("not enough memory", "can't allocate memory", "out of memory", "_status_alloc_failed")
_CALM, _CALM_MOST = 64, 1 << 14  # batches in a row that fit until larger parts are tried; more after each failure
_HOPELESS = 2**31 - 1  # proposed instead of a number of parts, so that all ranks give up together


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means out of memory: torch.OutOfMemoryError, or a RuntimeError with its text.

    Args:
        error: any exception; the texts of the CPU allocator, MPS and cuBLAS are known.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)


def weighted_mean(done: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Return the mean loss of a batch from the losses of its parts; a single part is returned unchanged.

    Args:
        done: pairs of loss and weight, from `OutOfMemoryRetry.run`.
    """
    if len(done) == 1:
        return done[0][0]
    return torch.stack([loss * weight for loss, weight in done]).sum()


@final
class OutOfMemoryRetry:
    """Runs a batch whole while that works, and in parts that fit when it does not.

    The size that fits is remembered. After 64 batches that fit, parts of twice the size are tried, and when that fails,
    later and later.

    Args:
        split: splits a batch. Default: `split_batch`.
        agree: in a distributed run, a function that every rank calls with its number and that returns the largest of
            all ranks; called at least twice per batch, always by all ranks together.
        least: smallest number of rows in a part; 2 where BatchNorm learns from the batch.

    >>> import warnings
    >>> model = torch.nn.Linear(2, 1)
    >>> def work(rows, weight):
    ...     if len(rows) > 2:
    ...         raise torch.OutOfMemoryError("out of memory")
    ...     (model(rows).mean() * weight).backward()
    ...     return len(rows)
    >>> retry = OutOfMemoryRetry()
    >>> with warnings.catch_warnings(action="ignore"):
    ...     retry.run(work, torch.ones(8, 2), undo=model.zero_grad)
    [(2, 0.25), (2, 0.25), (2, 0.25), (2, 0.25)]
    >>> retry.size
    2
    """

    def __init__(self, *, split: Split = split_batch, agree: AgreeOnParts | None = None, least: int = 1) -> None:
        self.size: int | None = None
        """Rows of the largest part known to fit; None while whole batches fit."""
        self.retries = 0
        self._split = split
        self._agree = agree
        self._least = least
        self._batches, self._grown = 0, False
        self._calm, self._wait = 0, _CALM

    def run(
        self, work: Callable[[Any, float], Result], batch: Any, *, undo: Callable[[], None], step: int | None = None
    ) -> list[tuple[Result, float]]:
        """Call `work(part, weight)` for the parts of `batch`; return each result with its weight.

        `work` runs forward and backward of one part, its mean loss times `weight`. `undo` reverts what a partial run
        has done: gradients of this batch, buffers, random state; it is also called before any other error is raised.
        `step` is named in the error when nothing fits.
        """
        number = self._batches if step is None else step
        self._batches += 1
        before, parts = self.size, self._largest(self._start(batch))
        while True:
            done, text = self._try(work, batch, parts, undo)
            wanted = self._largest(parts if text is None else self._more(batch, parts))
            if wanted == parts:
                self.fitted(batch)
                return done
            if text is None:  # another rank ran out
                undo()
            done = []  # why: what the parts returned holds memory
            free_memory()
            if wanted >= _HOPELESS:
                self.size = before  # a batch of which no part fits says nothing about the next one
                raise self._halted(number, batch, text)
            if said := self._shrink(batch, wanted):
                warn(f"out of memory: {said}")
            parts = wanted

    def parts_of(self, batch: Any) -> list[BatchPart]:
        """Return the parts of `batch` at the present size; the whole batch while whole batches fit."""
        return [piece for piece in self._pieces(batch, self._start(batch)) if piece.weight > 0]

    def halve(self, batches: Sequence[Any]) -> str:
        """Make parts half as large as those of `batches`; return what to say about it, or "" where they cannot be."""
        largest = max(batches, key=self._rows)
        parts = self._more(largest, self._start(largest))
        return self._shrink(largest, parts) if parts < _HOPELESS else ""

    def _try(
        self, work: Callable[[Any, float], Result], batch: Any, parts: int, undo: Callable[[], None]
    ) -> tuple[list[tuple[Result, float]], str | None]:
        """The results, and what the error said if memory ran out. The error itself would keep its frames' tensors."""
        try:
            pieces = self._pieces(batch, parts)
            return [(work(piece.batch, piece.weight), piece.weight) for piece in pieces if piece.weight > 0], None
        except BaseException as error:
            undo()
            if not is_out_of_memory(error):
                raise
            return [], str(error).partition("\n")[0]

    def _pieces(self, batch: Any, parts: int) -> Sequence[BatchPart]:
        if parts == 1:  # a batch that was never in the way is not looked into
            return [BatchPart(batch=batch, weight=1.0, size=0)]
        most = self._most(batch)
        return self._split(batch, min(parts, most)) if most else self._pieces(batch, 1)

    def _rows(self, batch: Any) -> int:
        """0 for a batch that cannot be split."""
        try:
            return sum(piece.size for piece in self._split(batch, 1))
        except MisuseError:
            return 0

    def _most(self, batch: Any) -> int:
        """Parts that it can be split into; 0 for one that cannot be split."""
        rows = self._rows(batch)
        return max(1, rows // self._least) if rows else 0

    def _start(self, batch: Any) -> int:
        return 1 if self.size is None else max(1, min(-(-self._rows(batch) // self.size), self._most(batch)))

    def _more(self, batch: Any, parts: int) -> int:
        most = self._most(batch)
        return min(2 * parts, most) if parts < most else _HOPELESS

    def fitted(self, batch: Any) -> None:
        """Count a batch that fit in parts of the present size; after enough of them the next one gets larger parts."""
        if self.size is None:
            return
        self._calm += 1
        if self._calm >= self._wait:
            self._calm, self._grown = 0, True
            self.size = 2 * self.size if 2 * self.size < self._rows(batch) else None

    def _largest(self, parts: int) -> int:
        if self._agree is None:
            return parts
        agreed = self._agree(parts)
        if agreed < parts:
            raise MisuseError(f"agree({parts}) returned {agreed}: must return the largest number of all ranks")
        return agreed

    def _shrink(self, batch: Any, parts: int) -> str:
        self.retries += 1
        self._calm = 0
        if self._grown:
            self._grown, self._wait = False, min(2 * self._wait, _CALM_MOST)
        rows = self._rows(batch)
        if not rows:
            return ""
        self.size = -(-rows // parts)
        how = (
            f"retrying the batch of {rows} rows in {min(parts, rows)} parts of at most {self.size}; later batches start"
        )
        later = f"with this size, and larger parts are tried again after {self._wait} batches"
        return f"{how} {later}. The summed gradients equal those of the whole batch."

    def _halted(self, step: int, batch: Any, text: str | None) -> TrainingHalted:
        what = "another rank ran out of memory and cannot continue"
        if text is not None:
            rows = "a single row" if self._least == 1 else f"{self._least} rows, the minimum for BatchNorm"
            what = f"out of memory with {rows}: {text}"
            try:
                self._split(batch, 1)
            except MisuseError as reason:
                what = f"out of memory: {text}; and {reason}"
        return TrainingHalted(
            step=step,
            what=what,
            did=f"halved the micro-batch {self.retries} times; the gradients of this batch are discarded",
            try_next="steadystep.memory.checkpoint_blocks(model), mixed precision, shorter sequences",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "size": self.size,
            "retries": self.retries,
            "batches": self._batches,
            "calm": self._calm,
            "wait": self._wait,
            "grown": self._grown,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.size = None if state["size"] is None else int(state["size"])
        self.retries, self._batches = int(state["retries"]), int(state["batches"])
        self._calm, self._wait = int(state.get("calm", 0)), int(state.get("wait", _CALM))
        self._grown = bool(state.get("grown", False))


def free_memory() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()  # tensors in reference cycles
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        torch.get_device_module(accelerator).empty_cache()


@final
class Attempt:
    """Context manager that can restore gradients, buffers and random state of a model to those at its entry.

    An exception restores them too. Gradients accumulated before are set aside and added at the end, which needs the
    memory of one more set. Reusable.

    Args:
        model: the model.

    >>> model = nn.Linear(1, 1)
    >>> with Attempt(model) as attempt:
    ...     model(torch.ones(1, 1)).sum().backward()
    ...     attempt.undo()
    >>> model.weight.grad is None
    True
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = Buffers(model)
        self._device = device_of(self._parameters)
        self._rng = RngState(self._device)
        self._before: list[Tensor | None] = []

    def __enter__(self) -> Self:
        self._before = [p.grad for p in self._parameters]
        self._drop_gradients()
        self._buffers.remember()
        self._rng = RngState(self._device)
        return self

    def undo(self) -> None:
        """Restore the state at the entry of the block; the work may then be repeated."""
        self._drop_gradients()
        self._buffers.put_back()
        self._rng.restore()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.undo()
        for p, before in zip(self._parameters, self._before, strict=True):
            p.grad = _sum(before, p.grad)
        self._before = []

    def _drop_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None


@torch.no_grad()
def _sum(before: Tensor | None, new: Tensor | None) -> Tensor | None:
    if before is None or new is None:
        return new if before is None else before
    return before.add_(new) if before.layout is new.layout else before + new
