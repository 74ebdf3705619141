"""What a fault is: something that goes wrong at known steps, the same way every time; and what it may hit in a model.

Any loop can be broken on purpose with three words, and what is broken is mended when the step is over:

    with fault.at(step):
        guard.step(lambda batch: fault.loss(step, loss_fn(batch)), batch=fault.batch(step, batch))
"""

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from steadystep._utils.text import nearest_names
from steadystep._utils.tree import children, rebuilt
from steadystep.errors import MisuseError


def _same_batch(step: int, batch: Any) -> Any:
    return batch


def _same_loss(step: int, loss: Tensor) -> Tensor:
    return loss


def _nothing(step: int) -> AbstractContextManager[None]:
    return nullcontext()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault at certain steps: a changed batch, a changed loss, or something around the whole step.

    Computing the loss again within a step repeats the fault.
    """

    name: str
    """Name of the fault."""
    steps: Container[int]
    """The steps it happens at: a range, a set, or any other container."""
    change_batch: Callable[[int, Any], Any] = _same_batch
    """Called as (step, batch); returns the batch that training sees."""
    change_loss: Callable[[int, Tensor], Tensor] = _same_loss
    """Called as (step, loss); returns the loss that training sees."""
    around: Callable[[int], AbstractContextManager[None]] = _nothing
    """Called with the step; returns a context manager around forward, backward and update."""

    def batch(self, step: int, batch: Any) -> Any:
        """Return the batch that training sees; `batch` itself is left unchanged."""
        return self.change_batch(step, batch) if step in self.steps else batch

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Return the loss that training sees."""
        return self.change_loss(step, loss) if step in self.steps else loss

    def at(self, step: int) -> AbstractContextManager[None]:
        """Return the context manager for forward pass, backward pass and update of one step."""
        return self.around(step) if step in self.steps else nullcontext()


NO_FAULT = Fault(name="none", steps=())
"""A fault that never happens, for the run to compare with."""


@final
@dataclass(frozen=True, slots=True)
class AnyOf:
    """Every step that is in one of the parts."""

    parts: tuple[Container[int], ...]

    def __contains__(self, step: object) -> bool:
        return any(step in part for part in self.parts)


@final
@dataclass(frozen=True, slots=True)
class WithEves:
    """The steps, and the one before each: for what needs to see the step before."""

    steps: Container[int]

    def __contains__(self, step: object) -> bool:
        return step in self.steps or (isinstance(step, int) and step + 1 in self.steps)


@final
@dataclass(frozen=True, slots=True)
class OnRank:
    """The steps on one rank of a distributed run, and none elsewhere. Without one, this process is rank 0."""

    steps: Container[int]
    rank: int

    def __contains__(self, step: object) -> bool:
        # why: asked anew each time, because faults may be made before the process group is
        return self.rank == _rank() and step in self.steps


def _rank() -> int:
    ranks = torch.distributed
    return ranks.get_rank() if ranks.is_available() and ranks.is_initialized() else 0


def since(start: int) -> range:
    """Return all steps from `start` on.

    Args:
        start: the first step.
    """
    return range(start, sys.maxsize)


def draw(seed: int, step: int, what: str, count: int) -> int:
    """A number below `count`; `what` keeps two choices at one step apart.

    >>> draw(0, 500, "element", 10) == draw(0, 500, "element", 10)
    True
    """
    return _number(seed, step, what) % count


def permutation(seed: int, step: int, what: str, count: int) -> Tensor:
    """The numbers below `count` in another order, on the CPU; torch's own random numbers stay where they are."""
    rng = torch.Generator().manual_seed(_number(seed, step, what) >> 1)
    return torch.randperm(count, generator=rng)


def _number(seed: int, step: int, what: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{what}".encode()).digest()[:8], "big")


def together(faults: Sequence[Fault]) -> Fault:
    """Return one fault that is all of them, each at its own steps, in the order given.

    Args:
        faults: the faults; an empty sequence gives `NO_FAULT`.
    """
    if len(faults) < 2:
        return faults[0] if faults else NO_FAULT

    def batch(step: int, seen: Any) -> Any:
        for fault in faults:
            seen = fault.batch(step, seen)
        return seen

    def loss(step: int, seen: Tensor) -> Tensor:
        for fault in faults:
            seen = fault.loss(step, seen)
        return seen

    @contextmanager
    def around(step: int) -> Iterator[None]:
        with ExitStack() as stack:
            for fault in faults:
                stack.enter_context(fault.at(step))
            yield

    return Fault(
        name=" + ".join(fault.name for fault in faults),
        steps=AnyOf(tuple(fault.steps for fault in faults)),
        change_batch=batch,
        change_loss=loss,
        around=around,
    )


def on_rank(fault: Fault, rank: int) -> Fault:
    """Return the fault limited to one rank of a distributed run.

    Args:
        fault: the fault.
        rank: the rank it happens on; the others run the same steps without it.
    """
    return replace(fault, steps=OnRank(fault.steps, rank))


def pick(model: nn.Module, which: str | int) -> tuple[str, nn.Parameter]:
    """Its name and itself; raises `MisuseError` when there is none."""
    named = _trained(model)
    if isinstance(which, int) and -len(named) <= which < len(named):
        return named[which]
    for name, parameter in named:
        if name == which:
            return name, parameter
    near = nearest_names(str(which), [name for name, _ in named])
    raise MisuseError(f"no trainable parameter {which!r} among {len(named)}{near}")


def pick_layer(model: nn.Module, which: str | int) -> nn.Module:
    """A module by name, or by position among those that hold trainable parameters themselves."""
    layers: dict[str, nn.Module] = dict(model.named_modules())
    if isinstance(which, str) and which in layers and any(p.requires_grad for p in layers[which].parameters()):
        return layers[which]
    owners = [(n, m) for n, m in layers.items() if any(p.requires_grad for p in m.parameters(recurse=False))]
    if isinstance(which, int) and -len(owners) <= which < len(owners):
        return owners[which][1]
    near = nearest_names(str(which), [name for name, _ in owners])
    raise MisuseError(f"no layer {which!r} with trainable parameters among {len(owners)}{near}")


@final
class Element:
    """One element of one parameter. What is None is drawn from the seed and the step."""

    def __init__(self, model: nn.Module, *, parameter: str | int | None, element: int | None, seed: int) -> None:
        self._model, self._element, self._seed = model, element, seed
        self._target = None if parameter is None else pick(model, parameter)[1]
        size = None if self._target is None else self._target.numel()
        if size is not None and element is not None and not -size <= element < size:
            raise MisuseError(f"no element {element} in parameter {parameter!r}, which has {size}")

    def at(self, step: int) -> tuple[nn.Parameter, int]:
        """The parameter and the number of the element, counted along its rows."""
        target = self._target
        if target is None:
            named = _trained(self._model)
            if not named:
                raise MisuseError("the model has no trainable parameter")
            target = named[draw(self._seed, step, "parameter", len(named))][1]
        size = target.numel()
        return target, draw(self._seed, step, "element", size) if self._element is None else self._element % size


@torch.no_grad()
def put(tensor: Tensor, element: int, value: float) -> None:
    """Set one element in place, whatever the memory layout."""
    tensor.data[torch.unravel_index(torch.tensor(element % tensor.numel()), tensor.shape)] = value


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


GradientHook = Callable[[Tensor], Tensor | None]


@contextmanager
def hooked(pairs: Iterable[tuple[nn.Parameter, GradientHook]]) -> Iterator[None]:
    """Each hook sees its parameter's gradient in every backward pass until the end, and may replace it.

    It comes before the gradient is added up or, in a distributed run, averaged: what one rank does reaches all.
    """
    handles = [parameter.register_hook(hook) for parameter, hook in pairs]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that can have a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def replaced(batch: Any, part: int | str, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with one part changed: a position in a tuple or list, a key of a mapping, a field of a dataclass.

    A batch that is one tensor is its own only part. The batch given stays as it is.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    inner = children(batch)
    if inner is None:
        raise MisuseError(f"cannot change parts of a {type(batch).__name__}: use tensors, tuples, lists or mappings")
    place = _place(batch, part)
    parts = [held for _, held in inner]
    parts[place] = change(_tensor(parts[place], part))
    return rebuilt(batch, parts)


def _place(batch: Any, part: int | str) -> int:
    """Of a part among the children of a batch."""
    if isinstance(batch, list | tuple):
        if not isinstance(part, int) or not -len(batch) <= part < len(batch):
            raise _no_part(part, [str(i) for i in range(len(batch))])
        return part
    keys = list(batch) if isinstance(batch, Mapping) else [field.name for field in dataclasses.fields(batch)]
    if part not in keys:
        raise _no_part(part, [str(key) for key in keys])
    return keys.index(part)


def _tensor(value: Any, part: int | str) -> Tensor:
    if not isinstance(value, Tensor):
        raise MisuseError(f"only a tensor of real numbers can be changed; part {part!r} is {type(value).__name__}")
    return value


def _no_part(part: int | str, known: list[str]) -> MisuseError:
    return MisuseError(f"the batch has no part {part!r}; it has {', '.join(known)}")
