"""One micro-batch: its closure is called and its loss looked at; and the arithmetic of an update over several.

With weights w_i (token counts; 1 without) the update is the gradient of sum(w_i * loss_i) / sum(w_i). The sum of
weights is known only at the end, so each backward pass uses factor_i = w_i / (r * N) and the gradients are corrected
once, by N * r / sum(w_i). The reference r is the largest weight seen before, so that scaled fp16 losses stay in range.
For equal weights and a full group the correction is exactly 1 and factor_i is a plain division by N: the arithmetic of
the loop everybody writes, bit for bit. A group that is run again without some of its members is divided by how many are
left (`shared_by`), so that it has the bits of a group that never had the others.

Several ranks share r and the correction: their gradients have been averaged, so sum(w_i) is a mean over ranks too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.rng import RngState
from steadystep.config import Config
from steadystep.engine.arguments import real_number
from steadystep.engine.closures import Closure, RepeatableClosure
from steadystep.errors import ConfigError, MisuseError
from steadystep.optimizers import Trained
from steadystep.parallel.stages import Stages


@final
@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One call of `step` inside a group."""

    loss: Tensor
    """Detached; its value is read with everything else at the end of the group."""
    weight: float = 1.0
    recipe: RepeatableClosure | None = None
    batch: Any = None


@final
class Group:
    """The micro-batches of the update that is being collected."""

    def __init__(self, size: int, mean: Callable[[Sequence[float]], list[float]] = list) -> None:
        self.size = self.shared_by = size
        self._mean = mean
        """Of numbers over all ranks."""
        self.members: list[MicroBatch] = []
        self.repeatable = False
        """Every member can be run again."""
        self.stale = False
        """An interrupted pass left the gradients unusable: they must be computed again."""
        self.largest_weight = 0.0
        self._reference = 1.0
        self._weighted: bool | None = None

    @property
    def full(self) -> bool:
        """Time for the update."""
        return len(self.members) >= self.size

    @property
    def weighted(self) -> bool:
        """Whether weights were given."""
        return bool(self._weighted)

    def add(self, member: MicroBatch) -> None:
        """One more."""
        self.repeatable = member.recipe is not None and (self.repeatable or not self.members)
        self.members.append(member)

    def clear(self) -> None:
        """Start the next update."""
        self.members = []
        self.repeatable = self.stale = False
        self._weighted = None
        self.shared_by = self.size

    def weight_of(self, weight: float | None) -> float | None:
        """The weight as a number; changes nothing. Some micro-batches with one and some without have no meaning."""
        if self._weighted is not None and self._weighted != (weight is not None):
            raise MisuseError(
                "weight= was given for some micro-batches of one update and not for others: pass it for all or none"
            )
        if weight is None:
            return None
        value = real_number("weight", weight)
        if not (math.isfinite(value) and value >= 0):
            raise MisuseError(f"weight = {weight!r}: must be a finite number of at least 0, such as a number of tokens")
        return value

    def check_weight(self, weight: float | None) -> float:
        """The weight as a number, from now on one of this group."""
        value = self.weight_of(weight)
        if value is None:
            if self._weighted is None:
                self._weighted, self._reference = False, 1.0
            return 1.0
        if self._weighted is None:
            (self._reference,) = self._mean([self.largest_weight or value or 1.0])
        self._weighted = True
        self.largest_weight = max(self.largest_weight, value)
        return value

    def scaled(self, loss: Tensor, weight: float) -> Tensor:
        """The loss as it goes into backward."""
        if weight == self._reference:
            return loss if self.shared_by == 1 else loss / self.shared_by
        return loss * (weight / self._reference / self.shared_by)

    def correction(self, kept: Sequence[int]) -> float:
        """The factor that turns the collected gradients into those of the weighted mean over `kept`."""
        if not self._weighted and len(kept) == self.shared_by:
            return 1.0
        total = self.total(kept)
        return self.shared_by * self._reference / total if total else 1.0

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state; it decides how later losses are scaled before they are added up."""
        return {"largest_weight": self.largest_weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.largest_weight = float(state["largest_weight"])

    def total(self, kept: Sequence[int]) -> float:
        """What these members count together, as a mean over ranks; zero: there is nothing to learn from."""
        own = sum(self.members[i].weight for i in kept)
        if not self._weighted:
            return own
        # why both: the largest is saved by one rank only, so it has to be the same on all when a group is over
        total, self.largest_weight = self._mean([own, self.largest_weight])
        return total


_TOUCHED = (
    "the closure called backward or zero_grad: return the loss only; the guard does backward, clipping, the step "
    "and zero_grad"
)


@final
class OnlyTheLoss:
    """A context around the closure; as cheap as two entries of a dictionary."""

    def __init__(self, optimizer: Optimizer, trained: Trained, *, backward: bool = False) -> None:
        self._optimizer = optimizer
        self._trained = trained
        self._backward = backward
        """The schedule of a pipeline runs it inside the closure."""
        self._step: Any = None
        self._marks: tuple[int | None, int | None] = (None, None)

    def __enter__(self) -> None:
        # why not a hook: it would stay, and torch steps more slowly with one
        self._step = self._optimizer.__dict__.get("step")
        self._optimizer.__dict__["step"] = _refuse
        self._marks = self._now()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._step is None:
            del self._optimizer.__dict__["step"]
        else:
            self._optimizer.__dict__["step"] = self._step
        if kind is None and not self._backward and self._now() != self._marks:
            raise MisuseError(_TOUCHED)

    def _now(self) -> tuple[int | None, int | None]:
        """A gradient's counter moves when something is added to it; the first and the last stand for all."""
        parameters = self._trained.parameters
        first, last = parameters[0].grad, parameters[-1].grad
        return None if first is None else first._version, None if last is None else last._version


def _refuse(*_: object, **__: object) -> NoReturn:
    raise MisuseError("the closure called optimizer.step: return the loss only; the guard takes the step")


_ON_META = "the loss is on the meta device and has no value: move the model and the batch to a real device"


def called(work: Closure, batch: Any) -> Any:
    """What the closure returns for its batch; a closure that cannot be called so is the caller's mistake."""
    try:
        return work() if batch is None else work(batch)
    except TypeError as error:
        trace = error.__traceback__
        inside = trace is not None and trace.tb_next is not None
        if inside and not isinstance(work, nn.Module):  # the closure's own error
            raise
        what = "the model" if isinstance(work, nn.Module) else "a closure that cannot be called like this"
        how = "guard.step(lambda: loss_fn(model(x), y)), or guard.step(lambda batch: ..., batch=batch)"
        raise MisuseError(
            f"step() was given {what} ({error}): pass a function that computes the loss, {how}"
        ) from error


def checked_loss(loss: Any) -> Tensor:
    """One real number with a graph, or an error that says what to return instead."""
    if not isinstance(loss, Tensor):
        raise MisuseError(f"the closure returned {type(loss).__name__}, expected the loss as a tensor of one element")
    if loss.numel() != 1 or not loss.is_floating_point():
        shape = "x".join(str(n) for n in loss.shape)
        raise MisuseError(
            f"the loss must be one real number, got a {loss.dtype} tensor of shape [{shape}]: take its mean"
        )
    if not loss.requires_grad:
        raise MisuseError(
            "the loss has no graph to differentiate: was it computed under no_grad, detached, converted to a "
            "number, or is every parameter frozen? Pass the loss tensor as computed from the model's output"
        )
    if loss.is_meta:
        raise MisuseError(_ON_META)
    return loss


_FIRST, _EVERY = 8, 256  # passes


@final
class Draws:
    """`before` and `after` each pass. A state is given where it is known, or still has to be found out, to matter."""

    __slots__ = ("_count", "_device", "_numpy", "_python", "_torch", "looked_at")

    def __init__(self, device: torch.device, *, by_modules: bool) -> None:
        self._device = device
        self._torch, self._python, self._numpy = by_modules, False, False
        self._count = 0
        self.looked_at: RngState | None = None
        """What the pass at hand began with, while it is to be found out whether that matters."""

    def before(self) -> RngState | None:
        """What the pass begins with."""
        self._count += 1
        if self._count <= _FIRST or self._count % _EVERY == 0:
            self.looked_at = RngState(self._device, python=True, numpy=True)
            return self.looked_at
        if self._torch or self._python or self._numpy:
            return RngState(self._device, python=self._python, numpy=self._numpy)
        return None

    def after(self, *, last: bool = False) -> None:
        """The pass is over; `last` says that its update is too."""
        if self.looked_at is not None:
            drawn, python, numpy = self.looked_at.moved()
            self._torch, self._python, self._numpy = self._torch or drawn, self._python or python, self._numpy or numpy
            self.looked_at = None if last else self.looked_at


def draws(model: nn.Module) -> bool:
    """Whether a forward pass draws random numbers, as far as its modules tell: dropout, also inside other layers."""
    return any("Dropout" in type(m).__name__ or getattr(m, "dropout", 0) for m in model.modules())


def check_pipelined(config: Config, stages: Stages | None) -> None:
    """Refuse what a schedule that runs backward by itself leaves no place for."""
    if stages is None:
        return
    training = config.training
    clips = training.clip_norm is not None and training.clip_rule in ("tensor-ema", "agc")
    refused = {
        "training.gradient_accumulation_steps": training.gradient_accumulation_steps > 1,
        "training.mixed_precision: fp16": training.mixed_precision == "fp16",
        "training.clip_rule: tensor-ema or agc together with max_grad_norm": clips,
        "monitoring.recompute_every": bool(config.monitoring.recompute_every),
    }
    if named := [key for key, asked in refused.items() if asked]:
        raise ConfigError(
            f"a pipeline's schedule runs its micro-batches and their backward passes itself: remove {', '.join(named)}"
        )


def refuse_loss(work: object, weight: float | None) -> None:
    """Refuse what a pipeline cannot be given: its gradients exist once its schedule has run."""
    if weight is not None or isinstance(work, Tensor):
        raise MisuseError(
            "a pipeline's schedule runs backward itself: pass step() a function that calls schedule.step(...) and "
            "returns the loss on the last stage, None on the others; without weight="
        )
