"""Forward and backward passes of one group of micro-batches: the first time, and again without the bad ones."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadystep.accumulation.group import Group, MicroBatch
from steadystep.accumulation.recipe import Closure, Recipe, RngState
from steadystep.buffers import Buffers
from steadystep.clip.global_norm import multiply_
from steadystep.errors import MisuseError
from steadystep.norms import layout_of
from steadystep.precision import Precision

# The same batch with the same random numbers gives the same loss, up to non-deterministic kernels and to statistics
# that the left-out batch had moved. Another batch is further away than this.
_SAME_LOSS = 1e-3


@final
class Passes:
    """Collects gradients for one update. Touches gradients, buffers and random state, never weights."""

    def __init__(
        self,
        optimizer: Optimizer,
        precision: Precision,
        buffers: Buffers,
        *,
        size: int,
        device: torch.device,
        retry: bool,
    ) -> None:
        self.group = Group(size)
        self._optimizer = optimizer
        self._precision = precision
        self._buffers = buffers
        self._device = device
        # A group of one has nothing to leave out, so nothing is kept for it.
        self._keep_recipes = retry and size > 1
        self._warned = False
        self._open = False
        self._busy = False
        self._given_losses = False

    def add(self, work: Closure | Tensor, *, batch: Any, weight: float | None) -> MicroBatch:
        """Run one micro-batch into the group."""
        number = self.group.check_weight(weight)
        self._open = True
        recipe = None
        if isinstance(work, Tensor):
            self._warn_about_autocast()
            self._given_losses = True
            loss = work
        else:
            self._given_losses = False
            if not self.group.members:
                self._buffers.remember()
            if self._keep_recipes:
                recipe = Recipe(work, batch, device=self._device)
            with self._precision.autocast():
                loss = work() if batch is None else work(batch)
        self._backward(_checked(loss), number)
        seen = loss.detach()
        member = MicroBatch(loss=seen.reshape(()) if seen.dim() else seen, weight=number, recipe=recipe, batch=batch)
        self.group.add(member)
        return member

    def __enter__(self) -> None:
        """Around everything a guard does in one call: one at a time, and an exception leaves no traces."""
        if self._busy:
            raise MisuseError("step() was called from inside step(): the closure must only compute the loss")
        self._busy = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._busy = False
        if kind is not None:
            self._abandon()

    def _abandon(self) -> None:
        """A pass was interrupted: drop its traces. Members that can be run again will be, by `refresh`."""
        if not self._open:
            return
        self._precision.refuse(overflow=False)
        self._optimizer.zero_grad()
        self._buffers.put_back()
        if self.group.repeatable:
            self.group.stale = True
        else:
            self.close()

    def close(self) -> None:
        """The fate of this update is sealed; the next call of `add` starts another."""
        if self._given_losses:  # the next forward pass runs before we are called: remember now
            self._buffers.remember()
        self.group.clear()
        self._open = False

    def refresh(self) -> bool:
        """Compute the gradients again if an interruption spoiled them. False: they could not be."""
        if not self.group.stale:
            return True
        losses = torch.stack([m.loss for m in self.group.members]).tolist()  # sync: only after trouble
        with self._random_state_kept():
            return self._run_again(range(len(losses)), losses)

    def finish(self, kept: Sequence[int]) -> None:
        """Turn what was collected into the gradients of the weighted mean over `kept`."""
        if self._precision.scales:
            self._precision.unscale_(self._optimizer)
        correction = self.group.correction(kept)
        if correction != 1.0:
            grads = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
            multiply_(grads, layout_of(grads), torch.tensor(correction))

    def compute_again(
        self, losses: Sequence[float], *, without: Sequence[int], finite: Callable[[Sequence[int]], bool]
    ) -> tuple[int, ...]:
        """Gradients of the group without its bad members; returns the positions of those that were kept.

        Members known to be bad (`without`) are left out at once. If what remains is still not finite, each member is
        tried alone. Returns () when nothing usable remains or the closures turn out not to repeat.
        """
        kept: Sequence[int] = [i for i in range(len(self.group.members)) if i not in without]
        with self._random_state_kept():
            if without and self._run_again(kept, losses) and finite(kept):
                return tuple(kept)
            kept = [i for i in kept if self._run_again([i], losses) and finite([i])]
            return tuple(kept) if self._run_again(kept, losses) and finite(kept) else ()

    @contextmanager
    def _random_state_kept(self) -> Iterator[None]:
        """Running again must not shift the random numbers that come after."""
        rng = RngState(self._device)
        try:
            yield
        finally:
            rng.restore()

    def _run_again(self, positions: Sequence[int], losses: Sequence[float]) -> bool:
        self._precision.refuse(overflow=False)
        self._optimizer.zero_grad()
        self._buffers.put_back()
        seen = []
        for i in positions:
            member = self.group.members[i]
            assert member.recipe is not None
            with self._precision.autocast():
                loss = member.recipe.run_again()
            self._backward(loss, member.weight)
            seen.append(loss.detach().reshape(()))
        self.group.stale = False
        values = torch.stack(seen).tolist() if seen else []  # sync: only after trouble
        if all(_same(value, losses[i]) for i, value in zip(positions, values, strict=True)):
            return bool(seen)
        warnings.warn(
            "steadystep: a closure gave another loss when it was run again, so this group of micro-batches is dropped "
            "whole. Pass the data as step(closure, batch=...) to make it repeatable.",
            stacklevel=2,
        )
        return False

    def _backward(self, loss: Tensor, weight: float) -> None:
        if weight > 0:
            self._precision.backward(self.group.scaled(loss, weight))

    def _warn_about_autocast(self) -> None:
        if self._precision.casts and not self._warned:
            self._warned = True
            warnings.warn(
                f"steadystep: mixed_precision is {self._precision.setting}, but a loss given as a tensor was computed "
                "before the guard could autocast. Pass a closure, or wrap your forward pass in "
                "guard.precision.autocast() and set autocast: false.",
                stacklevel=4,
            )


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise MisuseError(f"the closure returned {type(loss).__name__}, expected the loss as a tensor of one element")
    if loss.numel() != 1 or not loss.is_floating_point():
        shape = "x".join(str(n) for n in loss.shape)
        raise MisuseError(
            f"the loss must be one real number, got a {loss.dtype} tensor of shape [{shape}]: take its mean"
        )
    if not loss.requires_grad:
        raise MisuseError(
            "the loss has no graph to differentiate: was it computed under no_grad, detached, or turned into a number?"
        )
    return loss


def _same(value: float, expected: float) -> bool:
    if not math.isfinite(expected):
        return not math.isfinite(value)
    return abs(value - expected) <= _SAME_LOSS * max(abs(expected), 1e-3)
