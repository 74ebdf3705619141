"""An incident between being noticed and being dealt with: the weights are still those the step started from.

What a step starts from (weights, buffers, modes, optimizer, random state) is a mapping, and goes back into a model.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.modules import unwrapped
from steadystep._utils.rng import RngState, random_numbers_kept
from steadystep._utils.tensors import device_of, is_sharded
from steadystep._utils.text import nearest_names, plain_name
from steadystep._utils.tree import mapped
from steadystep.errors import ConfigError
from steadystep.incidents.bundle import Draft
from steadystep.incidents.locate import AgreeOnBad, examine
from steadystep.incidents.origin import Examination, Origin, of_weights, sick_weights
from steadystep.optimizers import own_state
from steadystep.parallel import Ranks
from steadystep.precision import Precision
from steadystep.records import Outcome, Signals
from steadystep.snapshots.buffers import Buffers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from steadystep.engine.closures import Closure


def step_state(model: nn.Module, optimizer: Optimizer | None, rng: RngState | None) -> dict[str, Any]:
    """Alive, not copied: written at once or not at all. Buffers that are not persistent are there too."""
    model = unwrapped(model)
    return {
        "parameters": {plain_name(n): p.detach() for n, p in model.named_parameters() if not nn.parameter.is_lazy(p)},
        "buffers": {plain_name(n): b.detach() for n, b in model.named_buffers() if not nn.parameter.is_lazy(b)},
        "evaluating": [plain_name(n) for n, m in model.named_modules() if not m.training],
        "optimizer": None if optimizer is None else own_state(optimizer),
        "random": None if rng is None else rng.as_dict(),
    }


def gathered(state: Any, *, keep: bool) -> Any:
    """The same with whole tensors in place of parts, on the host; all ranks call it, and one of them keeps them.

    One tensor after another, so that an accelerator holds no more than one of them whole.
    """

    def whole(tensor: Tensor) -> Tensor | None:
        if not is_sharded([tensor]):
            return tensor
        together = cast("DTensor", tensor).full_tensor()
        return together.cpu() if keep else None  # sync: only in trouble

    return mapped(state, whole)


def load_step_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Into a model of the same make, strictly.

    Raises:
        ConfigError: something is missing, left over or of another shape; the message names the first that differs.
    """
    model = unwrapped(model)
    for kind, named in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        _fill(kind, {plain_name(name): tensor for name, tensor in named}, state[kind])
    evaluating = set(state["evaluating"])
    for name, module in model.named_modules():
        module.training = plain_name(name) not in evaluating


@torch.no_grad()
def _fill(kind: str, here: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    one = kind[:-1]
    for name, tensor in kept.items():
        if name not in here:
            raise ConfigError(
                f"{one} {name!r} is in the bundle but not in the factory's model{nearest_names(name, list(here))}"
            )
        mine = here[name]
        if nn.parameter.is_lazy(mine):
            raise ConfigError(
                f"{one} {name!r} of the factory's model is lazy: run one batch through the model in the factory"
            )
        if mine.shape != tensor.shape:
            kept_shape, shape = list(tensor.shape), list(mine.shape)
            raise ConfigError(f"{one} {name!r} has shape {kept_shape} in the bundle and {shape} in the factory's model")
    for name in here:
        if name not in kept:
            raise ConfigError(f"{one} {name!r} of the factory's model is not in the bundle")
    for name, tensor in kept.items():
        mine = here[name]
        mine.data = tensor.to(mine.device, copy=True) if mine.dtype != tensor.dtype else mine.data.copy_(tensor)


_NO_FUNCTION = (
    "it cannot be re-run without a function that computes this loss: use guard.step(function), or "
    "watcher.loss(loss, again=function)"
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedStep:
    """A refused step that was run again, and the bundle that is being written about it."""

    examination: Examination
    """Result of the second run."""
    precision: str
    """Precision of the step: fp32, bf16 or fp16."""
    draft: Draft | None = None
    """The bundle; None if it could not be written."""
    rank: int = 0
    """Rank on which it began."""
    said: str | None = None
    """Description from that rank; None in a single process."""


@contextmanager
def as_before(buffers: Buffers | None) -> Iterator[None]:
    """Buffers as they were before the forward pass; afterwards as they are now."""
    if buffers is None:
        yield
        return
    with buffers.untouched():
        buffers.put_back(outside=False)
        yield


def second_look(
    model: nn.Module,
    work: "Closure | None",
    batch: Any,
    *,
    rng: RngState | None = None,
    precision: Precision | None = None,
    scale: float = 1.0,
    agree: AgreeOnBad | None = None,
) -> Examination:
    """Run a step again under hooks; whatever the user's code raises becomes part of the answer.

    With `agree` all ranks do so together: see `examine`.
    """
    if work is None:
        origin = of_weights(model, sick_weights(model))
        return Examination(origin=origin or Origin(what=_NO_FUNCTION))

    def run() -> Any:
        with nullcontext() if precision is None else precision.autocast():
            return work() if batch is None else work(batch)

    asked = False

    def all_agree(flag: bool) -> bool:
        nonlocal asked
        asked = True
        return agree is None or agree(flag)

    with random_numbers_kept(device_of(model.parameters())):
        if rng is not None:
            rng.restore()
        try:
            return examine(model, run, batch=batch, scale=scale, agree=None if agree is None else all_agree)
        except Exception as error:
            if agree is not None and not asked:
                agree(False)  # the others wait for an answer
            return Examination(origin=Origin(what=f"it could not be re-run: {type(error).__name__}: {error}"))


_WITH_NORMS = 50  # newest steps that keep the norm of every tensor in the file; a large model has thousands


@final
class History:
    """Ring buffer of outcomes; nothing is copied or formatted until it is written.

    Args:
        length: number of outcomes to keep.
    """

    def __init__(self, length: int = 500) -> None:
        self._past: deque[Outcome] = deque(maxlen=length)

    def note(self, outcome: Outcome) -> None:
        """Add an outcome; the oldest is dropped."""
        self._past.append(outcome)

    def __len__(self) -> int:
        return len(self._past)

    @property
    def last(self) -> Outcome | None:
        """The newest outcome."""
        return self._past[-1] if self._past else None

    def lines(self) -> Iterator[str]:
        """Yield one line of JSON per outcome, oldest first; `Outcome.from_json` reads them."""
        old = len(self._past) - _WITH_NORMS
        for i, outcome in enumerate(self._past):
            signals = outcome.signals
            if i < old and signals is not None and signals.norms:
                outcome = replace(outcome, signals=replace(signals, names=(), norms=()))
            yield outcome.to_json()


_BAD, _FINE = "!", "."


def whose(ranks: Ranks, signals: Signals, found: Examination, said: str) -> tuple[int, str]:
    """The rank, and what it has to say: one whose own loss was bad, else one where it showed again, else the first.

    All ranks call it, each with what it found.
    """
    every = ranks.texts(f"{_FINE if found.finite else _BAD}{said}")
    again = [rank for rank, text in enumerate(every) if text.startswith(_BAD)]
    both = [rank for rank in again if rank in signals.bad_ranks]
    rank = next(iter([*both, *signals.bad_ranks, *again]), 0)
    text = every[rank][1:]
    known = bool(again or signals.bad_ranks)
    return rank, f"rank {rank}: {text}" if known and text else text
