"""What a few passes show without any update: parts of a batch, loss calls, parameters that nothing can move."""

import copy
import math
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steadystep._utils.tree import mapped, tensors_in
from steadystep.examination.loss_calls import LossRecorder, record_losses
from steadystep.examination.workbench import Prepare, Workbench

_PASSES = 24
"""Batches that are run forward."""
_BACKWARDS = 8
_FUTURE = 200


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The tensors of one forward pass, by the part they play."""

    inputs: dict[str, Tensor]
    """Tensors of the batch that the model was given, by their place in the batch."""
    targets: dict[str, Tensor]
    """The other tensors of the batch."""
    given: tuple[Tensor, ...]
    """What the model was called with."""
    modules: tuple[nn.Module, ...]
    """The model, or the parts of it that were called instead; once per call."""
    outputs: tuple[Tensor, ...]
    loss: float
    recorder: LossRecorder = field(repr=False)

    @property
    def num_samples(self) -> int:
        """By the first dimension of the inputs."""
        return max((rows(tensor) for tensor in self.inputs.values()), default=0)

    def with_inputs(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """A batch of the same form with each input that has a row per sample changed."""
        return _replaced(batch, self.inputs, change)

    def with_targets(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """A batch of the same form with each target that has a row per sample changed."""
        return _replaced(batch, self.targets, change)


def _replaced(batch: Any, names: Container[str], change: Callable[[Tensor], Tensor]) -> Any:
    """Another batch in which the tensors of these names are changed, as far as containers hold them."""
    # why by position: one tensor may stand in a batch twice, as input and as target
    named = list(tensors_in(batch))
    size = max((rows(t) for name, t in named if name in names), default=0)
    chosen = iter(named)

    def replace(tensor: Tensor) -> Tensor:
        name = next(name for name, each in chosen if each is tensor)  # objects are passed over: they stay as they are
        return change(tensor) if name in names and rows(tensor) == size else tensor

    return mapped(batch, replace)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters that cannot learn, by the reason."""

    trainable: int
    """Numbers that may be trained, of all that the model has."""
    total: int
    frozen: tuple[str, ...] = ()
    not_in_optimizer: tuple[str, ...] = ()
    """Of the model, trainable, with a gradient, and in no group."""
    outside_model: int = 0
    """Tensors that the loss depends on and that are neither in the model nor in the optimizer."""
    strangers: int = 0
    """Tensors of the optimizer that the loss does not depend on and that are not in the model."""
    held: int = 0
    """Tensors in the optimizer."""
    rate_zero: tuple[str, ...] = ()
    no_gradient: tuple[str, ...] = ()
    """In the optimizer, trainable, and without a gradient, or with one that is zero, in every batch."""
    norms: dict[str, float]
    """Largest gradient norm of each over the batches."""
    sizes: dict[str, float]
    """Root mean square of each weight."""
    half_precision: tuple[str, ...] = ()
    scheduled: bool = False
    """A schedule of torch has been attached to the optimizer."""


@final
@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module from outside of the model."""

    module: nn.Module
    given: Any
    output: Any


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """The outermost calls: of the model itself, or of its parts where a loop calls those."""
    calls: list[ModuleCall] = []
    inside: list[nn.Module] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        inside.append(module)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        while inside and inside.pop() is not module:  # why: a call that raised has left none
            pass
        if not inside:
            calls.append(ModuleCall(module, (args, kwargs), output))

    hooks = []
    for module in model.modules():
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, with_kwargs=True)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def observe_passes(bench: Workbench) -> list[Pass]:
    """Run the loss of several batches once, and tell inputs from targets."""
    with bench.set_aside(), torch.no_grad():
        return [_observe(bench, batch) for batch in bench.every[:_PASSES]]


def _observe(bench: Workbench, batch: Any) -> Pass:
    with _recorded(bench.model) as calls:
        recorder, loss = record_losses(bench.loss, batch)
    given = [tensor for call in calls for _, tensor in tensors_in(call.given)]
    held = dict(tensors_in(batch))
    inputs = {name: tensor for name, tensor in held.items() if any(_is_same(tensor, each) for each in given)}
    if not inputs and len(held) > 1:  # why: a loss may scale or cast its input first; targets come last by custom
        inputs = dict(list(held.items())[:-1])
    if len(inputs) == len(held) > 1 and len(given) < len(held):  # the same tensor twice, as with input and target
        inputs = dict(list(held.items())[: len(given)])
    if len(held) == 1:  # the loss makes input and target of one tensor
        inputs = held
    compared = [call.target for call in recorder.calls if call.target is not None]
    known = {name for name, tensor in held.items() if any(_is_same(tensor, each) for each in compared)}
    if known and known != set(held):  # what is neither given nor compared is made into an input on the way
        inputs = {name: tensor for name, tensor in held.items() if name not in known or name in inputs}
    targets = {name: tensor for name, tensor in held.items() if name not in inputs}
    outputs = tuple(t for call in calls for _, t in tensors_in(call.output) if t.is_floating_point())
    return Pass(
        inputs=inputs,
        targets=targets,
        given=tuple(given),
        modules=tuple(call.module for call in calls),
        outputs=outputs,
        loss=float(loss.detach()),  # sync: examined
        recorder=recorder,
    )


def _is_same(held: Tensor, given: Tensor) -> bool:
    """Whether the model was given this tensor: itself, a view, or a copy of another type."""
    if held.data_ptr() == given.data_ptr():
        return True
    return held.numel() == given.numel() and torch.equal(held.flatten().double(), given.flatten().double())


def observe_parameters(bench: Workbench) -> Parameters:
    """A backward pass for several batches, and which parameters these, the flags and the optimizer leave out."""
    rates = {id(p): float(group["lr"]) for group in bench.optimizer.param_groups for p in group["params"]}  # sync: once
    named = dict(bench.model.named_parameters())
    names = {id(p): name for name, p in named.items()}
    batches = bench.batches[:_BACKWARDS]
    trained = {name: p for name, p in named.items() if p.requires_grad}
    norms = dict.fromkeys(trained, 0.0)
    missing = set(trained)
    leaves: dict[int, Tensor] = {}
    with bench.set_aside():
        for batch in batches:
            bench.optimizer.zero_grad()
            for p in named.values():
                p.grad = None
            with suppress(RuntimeError):  # why: a loss without a graph leaves every gradient out, which is reported
                loss = bench.loss(batch)
                leaves.update((id(leaf), leaf) for leaf in leaves_of(loss))
                torch.autograd.backward(loss)
            for name, p in trained.items():
                if p.grad is not None:
                    missing.discard(name)
                    norms[name] = max(norms[name], _norm(p.grad))
    given = {id(t) for batch in batches for _, t in tensors_in(batch)}
    outside = [leaf for key, leaf in leaves.items() if key not in names and key not in rates and key not in given]
    return Parameters(
        trainable=sum(p.numel() for p in trained.values()),
        total=sum(p.numel() for p in named.values()),
        frozen=tuple(name for name in named if name not in trained),
        not_in_optimizer=tuple(name for name, p in trained.items() if id(p) not in rates and norms[name] != 0.0),
        outside_model=len(outside),
        strangers=sum(key not in names and key not in leaves for key in rates),
        held=len(rates),
        rate_zero=tuple(name for name, p in trained.items() if rates.get(id(p)) == 0.0),
        no_gradient=tuple(name for name, p in trained.items() if norms[name] == 0.0 and id(p) in rates),
        norms=norms,
        sizes={name: _rms(p) for name, p in trained.items()},
        scheduled=any("initial_lr" in group for group in bench.optimizer.param_groups),
        half_precision=tuple(name for name, p in trained.items() if p.dtype == torch.float16),
    )


def has_gradient(bench: Workbench, prepare: Prepare) -> bool:
    """Whether any parameter gets a gradient that is not zero, after `prepare`."""
    with bench.set_aside():
        prepare(bench.model, bench.optimizer)
        with suppress(RuntimeError):  # why: a loss without a graph
            torch.autograd.backward(bench.loss(bench.batches[0]))
        return any(_norm(p.grad) != 0.0 for p in bench.model.parameters() if p.grad is not None)


def next_rates(bench: Workbench, scheduler: LRScheduler | None) -> list[float] | None:
    """The learning rates of the next steps of a schedule, which is put back; None without one that goes by steps."""
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return None
    state = copy.deepcopy(scheduler.state_dict())
    rates = []
    with bench.set_aside(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps without an optimizer's step between them are what is meant here
        try:
            for _ in range(_FUTURE):
                rates.append(max(float(group["lr"]) for group in scheduler.optimizer.param_groups))  # sync: examined
                scheduler.step()
        except Exception:  # why all: a schedule that ends raises what it likes
            pass
        finally:
            scheduler.load_state_dict(state)
    return rates


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Every leaf of the graph that gets a gradient: the weights a loss depends on, wherever they are kept."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(parent for parent, _ in node.next_functions)


def _norm(gradient: Tensor) -> float:
    value = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(value.detach().float().norm())  # sync: examined


def _rms(tensor: Tensor) -> float:
    return float(tensor.detach().float().square().mean().sqrt())  # sync: examined


def rows(tensor: Tensor) -> int:
    """How many samples, by the first dimension."""
    return tensor.shape[0] if tensor.dim() else 0


def by_sample(output: Tensor | None, size: int) -> Tensor | None:
    """An output with the samples first; None where no dimension is theirs."""
    if output is None or output.dim() == 0:
        return None
    if output.shape[0] == size:
        return output
    return output.movedim(1, 0) if output.dim() > 1 and output.shape[1] == size else None


def depends_on_input(bench: Workbench, batch: Any, seen: Pass, prepare: Prepare | None = None) -> float | None:
    """By how much outputs change, of their size, when the samples are exchanged; None where it cannot be told."""
    if seen.num_samples < 2 or not seen.inputs:
        return None
    plain, other = _outputs_of(bench, batch, seen.with_inputs(batch, lambda t: t.roll(1, 0)), prepare=prepare)
    if plain is None or other is None or plain.shape != other.shape:
        return None
    return float((other - plain).abs().max() / plain.abs().max().clamp_min(1e-12))  # sync: examined


def spread_of_outputs(bench: Workbench, batch: Any, seen: Pass, prepare: Prepare | None = None) -> float | None:
    """The mean of 1 - cosine between the outputs of two samples; None where there is no vector per sample."""
    (output,) = _outputs_of(bench, batch, prepare=prepare)
    if output is None or output.dim() != 2 or output.shape[1] < 2 or rows(output) < 2:
        return None
    return float(1.0 - torch.cosine_similarity(output, output.roll(1, 0), dim=1).mean())  # sync: examined


def depends_on_neighbors(bench: Workbench, batch: Any, seen: Pass) -> float | None:
    """By how much the output of a sample changes when all others are exchanged, of the outputs' spread.

    The largest of the first, the middle and the last sample: where samples are taken for time, the first sees none.
    """
    size = seen.num_samples
    if size < 3 or not seen.inputs:
        return None
    places = (0, size // 2, size - 1)
    turned = [seen.with_inputs(batch, lambda t, place=place: _others_turned(t, place)) for place in places]
    plain, *others = [by_sample(output, size) for output in _outputs_of(bench, batch, *turned)]
    if plain is None or any(o is None or o.shape != plain.shape for o in others):
        return None
    spread = plain.std().clamp_min(1e-6 * plain.abs().max()).clamp_min(1e-12)
    changes = [(o[p] - plain[p]).abs().max() / spread for o, p in zip(others, places, strict=True) if o is not None]
    return max(float(change) for change in changes)  # sync: examined


def _others_turned(tensor: Tensor, place: int) -> Tensor:
    """All samples but one in reversed order, and twice as large where they are real numbers."""
    other = tensor.flip(0) * 2 if tensor.is_floating_point() else tensor.flip(0)
    other[place] = tensor[place]
    return other


def depends_on_later(bench: Workbench, batch: Any, seen: Pass) -> float | None:
    """By how much the first outputs of a sequence change with its later inputs, of the outputs' spread."""
    sequences = [t for t in seen.inputs.values() if t.dim() == 2 and not t.is_floating_point() and t.shape[1] > 3]
    if not sequences or seen.num_samples < 2:
        return None
    length = sequences[0].shape[1]
    half = length // 2

    def changed(tensor: Tensor) -> Tensor:
        if tensor.dim() != 2 or tensor.shape[1] != length:
            return tensor
        return torch.cat([tensor[:, : half + 1], tensor[:, half + 1 :].roll(1, 0)], dim=1)

    pair = _outputs_of(bench, batch, seen.with_inputs(batch, changed))
    plain, other = (by_sample(output, seen.num_samples) for output in pair)
    if plain is None or other is None or plain.shape != other.shape or plain.dim() != 3 or plain.shape[1] < length - 1:
        return None
    change = (other[:, : half + 1] - plain[:, : half + 1]).abs().max()
    return float(change / plain.std().clamp_min(1e-12))  # sync: examined


def share_of_own_target(bench: Workbench, batch: Any, seen: Pass) -> float | None:
    """How much of the change that the target of one sample makes is in the gradient of that sample's own output."""
    size = seen.num_samples
    if size < 4 or not seen.targets or max(rows(t) for t in seen.targets.values()) != size:
        return None
    place = size // 2
    changed = seen.with_targets(batch, lambda t: _other_target(t, place))
    with bench.set_aside():
        bench.model.eval()
        plain, other = (by_sample(_output_gradient(bench, each), size) for each in (batch, changed))
    if plain is None or other is None or plain.shape != other.shape:
        return None
    change = (other - plain).float().square().reshape(size, -1).sum(1)
    total = float(change.sum())  # sync: examined
    return float(change[place]) / total if total > 0 and math.isfinite(total) else None


def _other_target(tensor: Tensor, place: int) -> Tensor:
    """The same targets but for one sample, which gets another."""
    other = tensor.clone()
    if tensor.is_floating_point():
        other[place] = tensor[place] + tensor.std() + 1.0
    else:
        different = (tensor != tensor[place]).reshape(rows(tensor), -1).any(1).nonzero()
        if len(different):
            other[place] = tensor[int(different[0])]  # sync: examined
    return other


def rewards_certainty(bench: Workbench, batch: Any, seen: Pass) -> bool:
    """Whether, with all advantages at zero, the loss of a policy still falls as its entropy does."""
    actions = [t for t in seen.targets.values() if not t.is_floating_point() and rows(t) == seen.num_samples]
    weights = [t for t in seen.targets.values() if t.is_floating_point() and t.dim() == 1]
    logits = [t for t in seen.outputs if t.dim() == 2 and t.shape[1] > 1 and rows(t) == seen.num_samples]
    if not actions or not weights or not logits or seen.recorder.calls:
        return False
    without = seen.with_targets(batch, lambda t: torch.zeros_like(t) if t.is_floating_point() else t)
    with bench.set_aside():
        gradient = _output_gradient(bench, without, shape=logits[0].shape)
    if gradient is None or not bool(gradient.any()):  # sync: examined
        return False
    scores = logits[0].detach().clone().requires_grad_()
    logs = scores.log_softmax(1)
    (rising,) = torch.autograd.grad(-(logs.exp() * logs).sum(), scores)
    return float(torch.cosine_similarity(gradient.flatten(), rising.flatten(), dim=0)) > 0.3  # sync: examined


def _output_gradient(bench: Workbench, batch: Any, shape: torch.Size | None = None) -> Tensor | None:
    """The gradient of the loss with respect to the model's first output, or the first of this shape."""
    with _recorded(bench.model) as calls:
        try:
            loss = bench.loss(batch)
            outputs = [t for call in calls for _, t in tensors_in(call.output) if t.requires_grad]
            outputs = [t for t in outputs if shape is None or t.shape == shape]
            return torch.autograd.grad(loss, outputs[0])[0] if outputs else None
        except (RuntimeError, ValueError, IndexError):  # why: the changed batch may not fit the user's loss
            return None


def _outputs_of(bench: Workbench, *batches: Any, prepare: Prepare | None = None) -> list[Tensor | None]:
    """The model's first output for each batch, in evaluation mode: neither dropout nor batch statistics."""
    with bench.set_aside(), torch.no_grad():
        if prepare is not None:
            prepare(bench.model, bench.optimizer)
        bench.model.eval()  # `set_aside` puts the modes back
        return [_output(bench, batch) for batch in batches]


def _output(bench: Workbench, batch: Any) -> Tensor | None:
    torch.manual_seed(0)
    with _recorded(bench.model) as calls:
        try:
            bench.loss(batch)
        except (RuntimeError, ValueError, IndexError):  # why: the changed batch may not fit the user's loss
            return None
    found = [t for call in calls for _, t in tensors_in(call.output) if t.is_floating_point()]
    return found[0].float() if found else None


def over_batches(passes: Sequence[Pass], pick: Callable[[Pass], Tensor | None]) -> Tensor | None:
    """One tensor per pass, joined along the samples; None where they do not fit together."""
    found = [tensor for tensor in map(pick, passes) if tensor is not None]
    if not found or len({tensor.shape[1:] for tensor in found}) != 1 or found[0].dim() == 0:
        return None
    return torch.cat([tensor.detach() for tensor in found])
