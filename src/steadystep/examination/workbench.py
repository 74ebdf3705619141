"""Short training trials from the present state of a job. Nothing stays changed: weights, optimizer, buffers, RNG."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.tree import tensors_in
from steadystep.clip import clip_global_norm_
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.lr_finder import restored
from steadystep.optimizers import needs_closure
from steadystep.signals.activations import SilentHook

BatchLoss = Callable[[Any], Tensor]
Prepare = Callable[[nn.Module, Optimizer], None]
_HELD, _HELD_SAMPLES = 8, 128  # batches, and samples where these are small, that trials do not train on
_AGAIN, _TWO_PER_CENT, _ERRORS = 3, 0.02, 2.5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """What a trial does differently from the run as it is."""

    lr_mult: float = 1.0
    change: Callable[[Any], Any] | None = None
    """Applied to every batch, those for the evaluation too."""
    batches: Sequence[Any] | None = None
    """Trained on instead of the job's own."""
    prepare: Prepare | None = None
    """Called once before the first step; what it changes in the model and the optimizer is undone afterwards."""
    per_update: int = 1
    """Batches whose gradients are averaged for one update."""
    clip: bool = True
    loss: "BatchLoss | None" = None
    """Instead of the job's own."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of one: losses of the held batches before and after, in pairs."""

    name: str
    """Of the variation, in one word."""
    what: str
    """The variation in words: "at 0.1 times the learning rate"."""
    before: tuple[float, ...]
    """Losses of the held batches before the first update."""
    after: tuple[float, ...]
    """The same batches after the last update."""
    losses: tuple[float, ...]
    """Of the batches that were trained on, one per update."""
    still: tuple[str, ...] = ()
    """Parameters without a gradient, or with one that is zero, after the last update."""
    at_end: float | None = None
    """What was asked of the trained model before everything was put back."""

    @property
    def finite(self) -> bool:
        """Every loss, before, during and after, is a number."""
        return all(map(math.isfinite, (*self.before, *self.after, *self.losses)))

    @property
    def start(self) -> float:
        """The mean of the held batches at first."""
        return fmean(self.before)

    @property
    def end(self) -> float:
        """Their mean after the last update; infinite where it is not a number."""
        return fmean(self.after) if all(map(math.isfinite, self.after)) else math.inf

    @property
    def gain(self) -> float:
        """How much of the first loss is gone, of its absolute value; at most 1 for losses above zero."""
        if not self.finite:
            return -math.inf
        return (self.start - self.end) / max(abs(self.start), 1e-12)

    @property
    def learns(self) -> bool:
        """The held loss falls: by two per cent, and by more than its spread over batches explains."""
        fall = self.start - self.end
        return (
            self.finite
            and self.gain > _TWO_PER_CENT
            and fall > _ERRORS * paired_standard_error(self.before, self.after)
        )

    def __str__(self) -> str:
        end = f"{self.end:.4g}" if math.isfinite(self.end) else "not finite"
        return f"{self.what}: {self.start:.4g} -> {end} in {len(self.losses)} updates"


def paired_standard_error(left: Sequence[float], right: Sequence[float]) -> float:
    """The standard error of the mean difference of pairs; infinite where one of them is not finite."""
    differences = [a - b for a, b in zip(left, right, strict=True)]
    if not all(map(math.isfinite, differences)):
        return math.inf
    return stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0


@final
class Workbench:
    """A model, its optimizer, its loss and some batches, with which trials are made."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: BatchLoss,
        batches: Sequence[Any],
        *,
        num_steps: int,
        max_grad_norm: float | None,
        seed: int,
        in_time: Callable[[], bool] = lambda: True,
        updated: int = 0,
        largest_rate: float = math.inf,
    ) -> None:
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise MisuseError(
                f"expected a model and an optimizer, got {type(model).__name__}, {type(optimizer).__name__}"
            )
        if needs_closure(optimizer):
            raise UnsupportedError(f"examine: {type(optimizer).__name__} needs a closure in step(), which trials lack")
        if not batches:
            raise MisuseError("examine needs at least one batch: give a loader, or a list of batches")
        size = max((t.size(0) for _, t in tensors_in(batches[0]) if t.dim()), default=1) or 1
        held = min(max(_HELD, _HELD_SAMPLES // size), len(batches) // 3)
        self.model, self.optimizer, self._loss = model, optimizer, loss
        self._takes_gradients = False
        self.plain: BatchLoss | None = getattr(loss, "plain", None)  # without autocast, where it has one
        self.batches: Sequence[Any] = batches[: len(batches) - held]
        self.every = batches
        self.held: Sequence[Any] = batches[len(batches) - held :] or batches
        self.num_steps = num_steps
        self.max_grad_norm = max_grad_norm
        self._seed, self.in_time = seed, in_time
        self.updated, self._largest_rate = updated, largest_rate  # what the job had made before, and at most
        self.num_updates = 0  # taken by all trials together

    def loss(self, batch: Any) -> Tensor:
        """What the user's function returns, if it is one real number."""
        value = self._value(batch)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            raise MisuseError(f"loss must return a tensor of one real number, got {_shown(value)}: take its mean")
        return value.reshape(())

    def _value(self, batch: Any) -> Tensor:
        """A loss that takes gradients itself, such as a penalty on them, cannot be computed without."""
        if torch.is_grad_enabled():
            return self._loss(batch)
        if not self._takes_gradients:
            random = torch.get_rng_state()
            try:
                return self._loss(batch)
            except RuntimeError:
                self._takes_gradients = True
                torch.set_rng_state(random)
        with torch.enable_grad():
            return self._loss(batch).detach()

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those of the model that may be trained."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Whatever happens inside is undone; random numbers begin at the seed."""
        with _unheard(self.model), restored(self.model, self.optimizer), torch.enable_grad():
            for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                setattr(self.optimizer, kind, OrderedDict())  # why: an average of weights must not learn from trials
            torch.manual_seed(self._seed)
            flags = [(p, p.requires_grad) for p in self.model.parameters()]
            try:
                yield
            finally:
                for p, flag in flags:
                    if p.requires_grad is not flag:
                        p.requires_grad_(flag)

    @contextmanager
    def other_seed(self) -> Iterator[None]:
        """Trials inside draw other weights and other random numbers."""
        self._seed += 1
        yield
        self._seed -= 1

    def losses(
        self, batches: Iterable[Any], change: Callable[[Any], Any] | None = None, loss: BatchLoss | None = None
    ) -> tuple[float, ...]:
        """The loss of each batch, with the same random numbers every time; no gradients."""
        found, loss = [], loss or self.loss
        with torch.no_grad():
            for number, batch in enumerate(batches):
                torch.manual_seed(self._seed + number)
                found.append(float(loss(batch if change is None else change(batch))))  # sync: reads the loss
        return tuple(found)

    def trial(
        self,
        name: str,
        what: str,
        variation: Variation,
        *,
        num_steps: int | None = None,
        at_end: Callable[[], float | None] | None = None,
    ) -> Trial:
        """Train for a few updates from the present state and tell what came of it."""
        with self.set_aside():
            if variation.prepare is not None:
                variation.prepare(self.model, self.optimizer)
            _set_rates(self.optimizer, variation.lr_mult, self._largest_rate)
            before = self.losses(self.held, variation.change, variation.loss)
            losses = tuple(self._train(variation, num_steps or self.num_steps))
            after = self.losses(self.held, variation.change, variation.loss)
            still = self._without_gradient(variation)
            end = None if at_end is None else at_end()
        return Trial(name=name, what=what, before=before, after=after, losses=losses, still=still, at_end=end)

    def repeats(self) -> bool:
        """Whether a short trial gives the same losses twice, to the bit."""
        twice = [self.trial("", "", Variation(), num_steps=_AGAIN) for _ in range(2)]
        self.num_updates -= 2 * _AGAIN
        return repr(twice[0].losses + twice[0].after) == repr(twice[1].losses + twice[1].after)  # why repr: NaN is NaN

    def _without_gradient(self, variation: Variation) -> tuple[str, ...]:
        for p in self.model.parameters():
            p.grad = None
        batch = self.batches[0]
        loss = self.loss(batch if variation.change is None else variation.change(batch))
        if loss.requires_grad:
            torch.autograd.backward(loss)
        found = [(name, p.grad.to_dense() if p.grad is not None else None) for name, p in self.parameters]
        return tuple(name for name, grad in found if grad is None or not bool(grad.any()))  # sync: once

    def _train(self, variation: Variation, num_steps: int) -> Iterator[float]:
        batches = self.batches if variation.batches is None else variation.batches
        compute = variation.loss or self.loss
        self.optimizer.zero_grad()
        for update in range(num_steps):
            total = 0.0
            for part in range(variation.per_update):
                batch = batches[(update * variation.per_update + part) % len(batches)]
                loss = compute(batch if variation.change is None else variation.change(batch)) / variation.per_update
                if loss.requires_grad:
                    torch.autograd.backward(loss)  # why not loss.backward(): a watcher would take it for the loop's
                total += loss.item()  # sync: ends a trial that has blown up
            if variation.clip and self.max_grad_norm is not None:
                clip_global_norm_(self.model.parameters(), self.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.num_updates += 1
            yield total
            if not math.isfinite(total) or not self.in_time():
                return


def _shown(value: object) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


@contextmanager
def _unheard(model: nn.Module) -> Iterator[None]:
    """Hooks of a guard or a watcher do not hear of the passes inside; those of the user do what they always do."""
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if isinstance(hook, SilentHook)
    ]
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook.muted())
        yield


def _set_rates(optimizer: Optimizer, factor: float, largest: float) -> None:
    """A multiple of the rate, or of the full rate where a schedule is still warming up or has decayed."""
    groups = optimizer.param_groups
    rates = [max(float(g.get(key) or 0.0) for key in ("lr", "initial_lr", "max_lr")) for g in groups]  # sync: once
    factor *= min(1.0, largest / max(*rates, 1e-300))  # why: what a schedule multiplies may be no rate, as Noam's 1
    for group, full in zip(groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(full * factor)
        else:
            group["lr"] = full * factor
