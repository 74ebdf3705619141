"""A closure that can be run again later and still means the same batch; one that fails; loops without an optimizer.

`for x, y in loader: guard.step(lambda: loss_fn(model(x), y))` has a trap: the lambda looks `x` up when it runs, and by
the end of an accumulation group `x` is another batch. So the names a closure reads, and those that functions of the
same module read for it, are bound to what they held when it was given. Random numbers are drawn again from the same
state, so that dropout repeats too. What cannot be bound (an attribute, a buffer that is filled anew) shows itself by
another loss.
"""

import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.rng import RngState
from steadystep._utils.text import warn
from steadystep.actions import Updater
from steadystep.diagnosis import exception_in_step
from steadystep.engine.learning_rate import LearningRate
from steadystep.errors import MisuseError, SteadystepError, TrainingHalted
from steadystep.memory.retry import OutOfMemoryRetry, free_memory, is_out_of_memory, weighted_mean
from steadystep.parallel import Ranks
from steadystep.policy import Budget, Limits, Mode
from steadystep.records import Action, Outcome, Plan

Closure = Callable[..., Tensor]


@final
class RepeatableClosure:
    """One micro-batch's forward pass, repeatable."""

    __slots__ = ("_bindings", "batch", "closure", "rng")

    def __init__(self, closure: Closure, batch: Any, rng: RngState) -> None:
        self.closure = closure
        self._bindings = _Bindings(closure) if isinstance(closure, types.FunctionType) else None
        self.batch = batch
        self.rng = rng
        """Before the forward pass."""

    def again(self) -> tuple[Closure, Any]:
        """The closure and its batch as they were given, with the random numbers put back to that moment."""
        self.rng.restore()
        return self.bound()

    def bound(self) -> tuple[Closure, Any]:
        """The closure and its batch as they were given."""
        return self._bindings.twin() if self._bindings else self.closure, self.batch

    def values(self) -> list[Any]:
        """What the closure reads from around it."""
        return [] if self._bindings is None else self._bindings.values()


@final
class BatchClosure:
    """As a recipe, for a closure that gets its data as `batch=`: nothing is bound, so it costs nothing to keep."""

    __slots__ = ("batch", "closure", "rng")

    def __init__(self, closure: Closure, batch: Any, rng: RngState | None) -> None:
        self.closure, self.batch, self.rng = closure, batch, rng

    def again(self) -> tuple[Closure, Any]:
        """The closure and its batch, with the random numbers put back where they are known to matter."""
        if self.rng is not None:
            self.rng.restore()
        return self.closure, self.batch


@final
class TapedClosure:
    """As a recipe, for a forward pass that a loop made itself: `batch` is what is held in memory for it."""

    __slots__ = ("batch", "beginning", "closure")
    rng: None = None
    """The loop has drawn what it draws, and perhaps its next batch: it goes on with the numbers of now."""

    def __init__(self, closure: Closure, batch: Any, beginning: RngState | None) -> None:
        self.closure, self.batch, self.beginning = closure, batch, beginning

    def again(self) -> tuple[Closure, Any]:
        """The pass, with the random numbers put back to its beginning."""
        if self.beginning is not None:
            self.beginning.restore()
        return self.closure, None


@final
class _Bindings:
    """What a function reads from around it, now, and so for the functions of its module that it can reach."""

    __slots__ = ("_cells", "_root", "_values")

    def __init__(self, function: types.FunctionType) -> None:
        self._root = function
        self._cells: dict[types.FunctionType, tuple[tuple[Any, ...], ...]] = {}
        self._values: dict[str, Any] = {}
        self._bind(function)

    def _bind(self, function: types.FunctionType) -> None:
        if function in self._cells or function.__globals__ is not self._root.__globals__:
            return
        contents = tuple(_content(cell) for cell in function.__closure__ or ())
        self._cells[function] = contents
        space = function.__globals__
        names = {name: space[name] for name in _names_read(function.__code__) if name in space}
        self._values.update(names)
        for value in (*(value for content in contents for value in content), *names.values()):
            if isinstance(value, types.FunctionType):
                self._bind(value)

    def values(self) -> list[Any]:
        """All that is bound."""
        cells = (value for contents in self._cells.values() for content in contents for value in content)
        return [*cells, *self._values.values()]

    def twin(self) -> types.FunctionType:
        """The function again, reading the bound values."""
        space = dict(self._root.__globals__)
        twins = {function: _hollow(function, space) for function in self._cells}
        for function, contents in self._cells.items():
            for cell, content in zip(twins[function].__closure__ or (), contents, strict=True):
                if content:
                    cell.cell_contents = _twin_or_self(content[0], twins)
        space.update({name: _twin_or_self(value, twins) for name, value in self._values.items()})
        return twins[self._root]


def _hollow(function: types.FunctionType, space: dict[str, Any]) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    twin = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _twin_or_self(value: Any, twins: dict[types.FunctionType, types.FunctionType]) -> Any:
    return twins.get(value, value) if isinstance(value, types.FunctionType) else value


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


def _names_read(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_read(constant)


_HALVED = 0.5


@final
@dataclass(frozen=True, slots=True)
class ClosureErrors:
    """Skips the step that raised and halves the learning rate; the one exception too many is for the caller."""

    budget: Budget
    updater: Updater
    learning_rate: LearningRate
    limits: Limits
    mode: Mode
    most: int
    """In 1,000 steps; 0 catches none."""

    def outcome(self, error: Exception, *, step: int) -> Outcome | None:
        """What became of the step; None when `error` is to be raised.

        Micro-batches that came before it in its group are kept, where they can be run again.
        """
        ours = isinstance(error, SteadystepError) or not self.updater.runner.failed_collecting
        if not self.most or self.mode == "observe" or ours:
            return None
        count = self.budget.raised(step)
        if count > self.most:
            error.add_note(
                f"steadystep: {count} exceptions in the last 1,000 steps, more than recovery.max_exceptions = "
                f"{self.most}; those steps were not applied, and the weights are those after the last accepted "
                "update"
            )
            return None
        plan = Plan(actions=(Action.SKIP_STEP,))
        asked = max((float(options["lr"]) for options in self.learning_rate.options()), default=0.0)
        if self.mode == "autopilot" and self.limits.rolls_back and asked > 0.0:
            in_use = asked * self.learning_rate.ceiling.multiplier(asked)
            lr = max(_HALVED * in_use, self.limits.lr_floor_mult * asked)
            plan = Plan(actions=(Action.SKIP_STEP, Action.CUT_LR), lr=lr)
        self.updater.prepare(plan)
        diagnosis = exception_in_step(error, plan)
        if self.updater.runner.group.members:
            plan = replace(plan, reason=diagnosis.cause)
            return Outcome(step=step, reading=math.nan, stepped=False, pending=True, plan=plan, diagnosis=diagnosis)
        return self.updater.drop(step, diagnosis, plan=plan)


_NOTHING = nullcontext()


@final
class RankShortage:
    """One of several ranks runs out of memory: all of them learn it with the step, and compute it again in parts.

    The rank sends zeros for its gradients, so that nobody waits for it, and says so in the payload of the step: a
    healthy step costs no further message. Parts before the last are not sent, so ranks may make different numbers of
    them.
    """

    def __init__(self, memory: OutOfMemoryRetry, ranks: Ranks, device: torch.device) -> None:
        self._memory, self._ranks, self._device = memory, ranks, device
        self._text: str | None = None
        """What the error said, where memory ran out in the update at hand."""
        self.seen = ranks.any_rank(lambda: self._text is not None)
        """Whether one rank ran out, as of the last agreement."""

    @classmethod
    def of(cls, memory: OutOfMemoryRetry | None, ranks: Ranks, device: torch.device) -> "RankShortage | None":
        """For several ranks that may split."""
        return None if memory is None or ranks.stand_in is None else cls(memory, ranks, device)

    def attempt(self, run: Callable[[Any, float], Tensor], batch: Any, *, unreduced: bool) -> Tensor:
        """Forward and backward of one micro-batch in parts that fit: its loss, or zero where none did."""
        ranks, stand_in, done = self._ranks, self._ranks.stand_in, []
        assert stand_in is not None
        parts = self._memory.parts_of(batch)
        try:
            for part in parts:
                alone = unreduced or part is not parts[-1]
                with ranks.unreduced() if alone else _NOTHING, stand_in.watching():
                    done.append((run(part.batch, part.weight).detach(), part.weight))
            if self._memory.size is not None:
                self._memory.fitted(batch)
            return weighted_mean(done)
        except (RuntimeError, MemoryError) as error:
            if not (is_out_of_memory(error) and stand_in.is_possible):
                raise
            self._text = str(error).partition("\n")[0]
        done.clear()  # out here, where the error and what its frames held are gone
        free_memory()
        stand_in.complete(reduced=not unreduced)
        return torch.zeros((), device=self._device)

    def split(self, batches: Sequence[Any], *, step: int) -> None:
        """Halve the parts of these batches on all ranks; raise on all where the one that ran out cannot."""
        text, self._text = self._text, None
        told = [(rank, said) for rank, said in enumerate(self._ranks.texts(text or "")) if said]
        where = "; ".join(f"rank {rank}: {said}" for rank, said in told)
        halved = self._memory.halve(batches)
        if not self._ranks.all(bool(halved) or text is None):
            raise TrainingHalted(
                step=step,
                what=f"out of memory on {where}; and the batch there cannot be split further",
                did=f"halved the micro-batch {self._memory.retries} times; the gradients of this batch are discarded",
                try_next="step(closure, batch=...), which can be split; steadystep.memory.checkpoint_blocks(model)",
            )
        if self._ranks.rank == 0:
            warn(f"out of memory on {where}. On all ranks: {halved or 'the same batch again'}")


BY_HAND_USAGE = (
    "Guard(model, None) has no optimizer to step: call loss.backward(), then plan = guard.inspect(loss); update "
    "the weights yourself if plan.proceeds, then call guard.commit(stepped=plan.proceeds)"
)


@final
class ByHand(Optimizer):
    """Stands for the loop's own arithmetic: it knows which parameters are trained, and never steps."""

    def __init__(self, model: nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise MisuseError("Guard(model, None): no parameter of this model requires a gradient")
        super().__init__(trained, {})  # why no rate: 0 would be one, and a fault

    def step(self, closure: Any = None) -> NoReturn:
        """Raise: there is nothing to step."""
        raise MisuseError(BY_HAND_USAGE)


def by_hand(model: nn.Module, schedule: Any, learning_rate: Any, scheduler: Any) -> ByHand:
    """Return what stands for an optimizer in `Guard(model, None)`; a learning rate would have nobody to use it."""
    if schedule is not None or learning_rate is not None or scheduler is not None:
        raise MisuseError(
            "Guard(model, None): a learning rate or a schedule has no effect without an optimizer: remove it"
        )
    return ByHand(model)
