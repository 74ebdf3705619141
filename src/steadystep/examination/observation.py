"""All that is seen of a job before its first trial."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from steadystep._utils import Attempts
from steadystep._utils.tree import tensors_in
from steadystep.diagnosis.facts import names
from steadystep.diagnosis.learning import base_of
from steadystep.diagnosis.measured import is_bias
from steadystep.examination.dependence import (
    blocked_positions,
    deaf_classes,
    depends_on_content,
    depends_on_input,
    depends_on_later,
    depends_on_neighbors,
    ignored_inputs,
    rewards_certainty,
    share_alike,
    share_of_own_target,
    spread_of_outputs,
)
from steadystep.examination.pairing import Modes, loss_by_mode, rows_move
from steadystep.examination.parameters import (
    Parameters,
    next_rates,
    observe_parameters,
    reached,
    restart,
    rounding_of,
)
from steadystep.examination.passes import Pass, links, num_rows, observe_passes, over_batches
from steadystep.examination.workbench import Workbench
from steadystep.signals.activations import Activations
from steadystep.signals.batch_stats import PartStats
from steadystep.signals.loss_calls import LossCall
from steadystep.signals.losses import KINDS, Copies, class_dim, without_ignored

_VANISHING = 1e-4  # of the largest gradient, by the size of the weights
CLASSES = ("cross_entropy", "nll_loss")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that was seen without a trial."""

    passes: Sequence[Pass]
    parameters: Parameters
    batches: Sequence[Any]
    rates: Sequence[float] | None
    """The next learning rates of the schedule; None where there is none, or it does not go by steps."""
    on_input: float | None
    """By how much outputs change when samples are exchanged."""
    on_input_fresh: float | None
    """The same with newly drawn weights."""
    spread: float | None
    """The mean of 1 - cosine between the outputs of two samples."""
    spread_fresh: float | None
    on_neighbors: float | None
    on_later: float | None
    own_target: float | None
    certainty: bool
    """A policy is rewarded for low entropy."""
    on_content: float | None = None
    """By how much outputs change when the ids of a sequence do and its padding does not."""
    blocked: tuple[int, int] | None = None
    """Positions that the loss depends on, and how many of these get no gradient."""
    alike: float | None = None
    """The share of samples whose output is that of the sample before, with newly drawn weights."""
    ignored: tuple[str, ...] = ()
    """Inputs that differ between samples and that the loss does not notice."""
    copied: str = ""
    """The feature of the input that is the target."""
    deaf: tuple[float, float] | None = None
    """The only class that the loss learns from, and one that it does not."""
    moves: bool | None = None
    """Rows of the output are in another order than those of the input."""
    modes: Modes | None = None
    """Losses in training and in evaluation mode."""
    rounding: float | None = None
    """By which share the loss changes in double precision."""
    reached_fresh: frozenset[str]
    """Parameters that get a gradient with newly drawn weights."""
    dead: dict[str, float]
    saturated: dict[str, float]

    @property
    def is_finite(self) -> bool:
        """All losses and gradients are numbers."""
        return all(map(math.isfinite, (*(seen.loss for seen in self.passes), *self.parameters.norms.values())))

    @property
    def is_graph(self) -> bool:
        """Samples are meant to depend on each other: batch or model have edges or an adjacency matrix."""
        seen = self.passes[0]
        held = [t for module in seen.modules for t in module.buffers() if t.dim() and len(t) == seen.num_samples]
        return any(links(tensor) for tensor in (*(t for _, t in tensors_in(self.batches[0])), *held))

    @property
    def is_sorted(self) -> bool:
        """The loss sorts its batch, as Cox's does by time: the model is given rows in another order than the batch."""
        held = [t for _, t in tensors_in(self.batches[0]) if t.dim() and t.layout is torch.strided and not t.is_nested]
        pairs = [
            (t, given)
            for given in self.passes[0].given
            for t in held
            if (t.shape, t.dtype) == (given.shape, given.dtype)
        ]
        return any(_is_permuted(t, given) for t, given in pairs) and not self.passes[0].unchanged

    @property
    def is_adversarial(self) -> bool:
        """Several networks, one called more than once, and no targets but constants: the level says nothing."""
        parts = {id(m): m for m in self.passes[0].modules if any(p.requires_grad for p in m.parameters())}
        targets = [c.target for c in self.calls if c.target is not None and c.target.numel() > 1]
        flat = [bool((t == t.flatten()[0]).all()) for t in targets]  # sync: examined
        if not all(flat):
            return False
        return len(flat) > 1 or (len(parts) > 1 and len(self.passes[0].modules) > len(parts))

    @property
    def is_solved(self) -> bool:
        """A policy that always acts alike: its batches are what it makes of them, and all the same."""
        held = [t for _, t in tensors_in(self.batches[0]) if t.dim() == 1]
        actions, numbers = [t for t in held if not t.is_floating_point()], [t for t in held if t.is_floating_point()]
        if self.calls or not actions or not numbers:
            return False
        return all(bool((t == t.flatten()[0]).all()) for t in actions)  # sync: examined

    @property
    def rounds(self) -> bool:
        """Every batch is the same: the whole data, or a whole graph."""
        first, *others = [[t for _, t in tensors_in(batch)] for batch in self.batches]
        return bool(first and others) and all(len(o) == len(first) and all(map(_equal, o, first)) for o in others)

    @property
    def contrasts(self) -> bool:
        """Each sample of a batch is a class of its own, as with negatives from the batch."""
        wanted = [c.target for c in self.calls if c.name in CLASSES and c.target is not None]
        return bool(wanted) and wanted[0].dim() == 1 and len(torch.unique(wanted[0])) == wanted[0].numel() > 3

    @property
    def calls(self) -> list[LossCall]:
        """Of the first pass."""
        return list(self.passes[0].calls)


def targets_of(o: Observation) -> Tensor | None:
    """Targets of all passes, as the loss function got them; those of the batch where no loss function was seen."""

    def from_call(seen: Pass) -> Tensor | None:
        return seen.calls[0].target if seen.calls else None

    def from_batch(seen: Pass) -> Tensor | None:
        fits = [t for t in seen.targets.values() if num_rows(t) == seen.num_samples]
        return fits[-1] if fits else None

    found = over_batches(o.passes, from_call)
    return over_batches(o.passes, from_batch) if found is None else found


def trivial_loss(o: Observation) -> float | None:
    """The loss of the best constant prediction, as a guard takes it; None where the loss is not one plain function."""
    call, factor = (o.calls[0] if len(o.calls) == 1 else None), _factor(o.passes)
    if call is None or call.target is None or call.weighted or factor is None or not call.target.dim():
        return None
    if call.name in CLASSES and len(torch.unique(call.target)) == call.target.numel() > 1:
        return None  # each sample is its own class, as with negatives from the batch
    part = PartStats("", call.target)
    for seen in o.passes:
        if len(seen.calls) != 1 or seen.calls[0].target is None or seen.calls[0].target.shape[1:] != part.shape:
            return None
        part.add(without_ignored(seen.calls[0]))
    stats = part.read(iter(part.pending().tolist()))  # sync: examined
    base, _ = base_of(KINDS.get(call.name, ""), stats)
    smoothing = float(call.options.get("label_smoothing", 0.0))
    if base is not None and smoothing:  # exact for labels that are equally frequent
        base = (1.0 - smoothing) * base + smoothing * math.log(call.given.shape[class_dim(call.given)])
    return None if base is None else factor * base


def _factor(passes: Sequence[Pass]) -> float | None:
    """The loss as a multiple of its only term, where it is the same one in every pass."""
    found = []
    for seen in passes:
        value = seen.calls[0].value if len(seen.calls) == 1 else None
        if value is None or not value > 0.0:
            return None
        found.append(seen.loss / value)
    usual = sorted(found)[len(found) // 2]
    return usual if usual > 0.0 and all(abs(f - usual) <= 1e-3 * usual for f in found) else None


def observe_program(bench: Workbench, scheduler: LRScheduler | None, attempt: Attempts) -> Observation:
    """Run a few passes, and put everything back."""
    batch, passes = bench.batches[0], observe_passes(bench)
    seen = passes[0]
    dead, saturated = attempt((dict[str, float](), dict[str, float]()), _activations, bench, batch)
    return Observation(
        passes=passes,
        parameters=observe_parameters(bench),
        batches=bench.every,
        rates=attempt(None, next_rates, bench, scheduler),
        on_input=attempt(None, depends_on_input, bench, batch, seen),
        on_input_fresh=attempt(None, depends_on_input, bench, batch, seen, prepare=restart),
        spread=attempt(None, spread_of_outputs, bench, batch, seen),
        spread_fresh=attempt(None, spread_of_outputs, bench, batch, seen, prepare=restart),
        on_neighbors=attempt(None, depends_on_neighbors, bench, batch, seen),
        on_later=attempt(None, depends_on_later, bench, batch, seen),
        own_target=attempt(None, share_of_own_target, bench, batch, seen),
        certainty=attempt(False, rewards_certainty, bench, batch, seen),
        on_content=attempt(None, depends_on_content, bench, batch, seen, prepare=restart),
        blocked=attempt(None, blocked_positions, bench, batch, seen),
        alike=attempt(None, share_alike, bench, batch, seen, prepare=restart),
        ignored=attempt((), ignored_inputs, bench, seen, prepare=restart),
        copied=attempt("", _copied, passes),
        deaf=attempt(None, deaf_classes, bench, seen, prepare=restart),
        moves=attempt(None, rows_move, bench, batch, seen),
        modes=attempt(None, loss_by_mode, bench, seen) if bench.updated else None,
        rounding=attempt(None, rounding_of, bench, batch),
        reached_fresh=attempt(frozenset(), reached, bench, prepare=restart),
        dead=dead,
        saturated=saturated,
    )


def _activations(bench: Workbench, batch: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of dead and of saturated units of each module."""
    watch = Activations(bench.model)
    with bench.set_aside(), watch.watching(), torch.no_grad():
        bench.loss(batch)
    found = watch.read([float(v) for t in watch.pending() for v in t.tolist()])  # sync: examined
    dead, saturated = (dict(zip(watch.modules, shares, strict=False)) for shares in found)
    return dead, saturated


def _copied(passes: Sequence[Pass]) -> str:
    """As a guard finds it in a run."""
    copies = Copies()
    for seen in passes:
        target = seen.calls[0].target if len(seen.calls) == 1 else None
        first = next((tensor for tensor in seen.given if tensor.dim()), None)
        if target is not None and target.dim() and first is not None:
            copies.add(first, target)
    return copies.read(*copies.pending(torch.device("cpu")).tolist())  # sync: examined


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def faint_gradients(o: Observation) -> str:
    """Weights whose gradient is next to nothing beside that of others."""
    sizes, norms = o.parameters.sizes, o.parameters.norms
    weights = [n for n in norms if sizes[n] > 0 and math.isfinite(norms[n]) and not is_bias(n)]
    relative = {n: norms[n] / sizes[n] for n in weights}
    if len(relative) < 3:
        return ""
    largest = max(relative.values())
    faint = [name for name, value in relative.items() if value < _VANISHING * largest]
    return f"the gradient of {names(faint)} is below 1e-4 of the largest, by the size of the weights" if faint else ""


def _is_permuted(held: Tensor, given: Tensor) -> bool:
    """Whether one has the rows of the other, in another order."""
    if held.is_complex() or torch.equal(held, given):  # sync: examined
        return False
    rows = [torch.unique(t.reshape(len(t), -1), dim=0, return_counts=True) for t in (held, given)]
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*rows, strict=True))  # sync: examined
