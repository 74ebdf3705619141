"""Losses, gradients, learning rates and moments that go wrong."""

import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.errors import MisuseError, UnsupportedError
from steadystep.faults.fault import Element, Fault, WithEves, hooked, pick_layer, put, since, trained


def bad_loss(*, steps: Container[int], value: float = math.nan) -> Fault:
    """Multiply the loss, and the gradients with it, by `value`.

    Args:
        steps: the steps it happens at.
        value: NaN by default.
    """
    return Fault(name="bad-loss", steps=steps, change_loss=lambda _, loss: loss * value)


def drifting_loss(*, start: int, per_step: float) -> Fault:
    """Raise the loss by `per_step` more with every step; the gradients stay unchanged.

    Args:
        start: the first step.
        per_step: what is added per step.
    """
    return Fault(
        name="drifting-loss",
        steps=since(start),
        change_loss=lambda step, loss: loss + per_step * (step - start + 1),
    )


def bad_gradient(
    model: nn.Module,
    *,
    steps: Container[int],
    value: float = math.nan,
    parameter: str | int | None = 0,
    element: int | None = 0,
    seed: int = 0,
) -> Fault:
    """Set one element of one parameter's gradient to `value`.

    Args:
        model: the model.
        steps: the steps it happens at.
        value: NaN by default. Under a loss scaler a finite value is divided by the scale.
        parameter: name or position; None draws it from `seed` and the step.
        element: position in the gradient; None draws it.
        seed: seed of the draws.
    """
    place = Element(model, parameter=parameter, element=element, seed=seed)

    def around(step: int) -> AbstractContextManager[None]:
        target, number = place.at(step)

        def spoil(gradient: Tensor) -> Tensor:
            if gradient.layout != torch.strided:
                raise UnsupportedError("a single element can be changed in dense gradients only; this one is sparse")
            spoilt = gradient.clone(memory_format=torch.contiguous_format)
            put(spoilt, number, value)
            return spoilt

        return hooked([(target, spoil)])

    return Fault(name="bad-gradient", steps=steps, around=around)


def scaled_gradients(
    model: nn.Module, *, steps: Container[int], factor: float, layer: str | int | None = None
) -> Fault:
    """Multiply all gradients, or those of one layer, by `factor`; -1 turns descent into ascent.

    Args:
        model: the model.
        steps: the steps it happens at.
        factor: factor on the gradients.
        layer: name or position of a layer; None for all.

    >>> model = nn.Linear(1, 1)
    >>> fault = scaled_gradients(model, steps={500}, factor=10.0)
    >>> def slope(step):
    ...     model.zero_grad()
    ...     with fault.at(step):
    ...         fault.loss(step, model(torch.ones(1, 1)).sum()).backward()
    ...     return model.weight.grad.item()
    >>> slope(499), slope(500), slope(501)
    (1.0, 10.0, 1.0)
    """
    target = model if layer is None else pick_layer(model, layer)

    def scale(gradient: Tensor) -> Tensor:
        return gradient * factor

    return Fault(name="scaled-gradients", steps=steps, around=lambda _: hooked((p, scale) for p in trained(target)))


def missing_zero_grad(model: nn.Module, *, steps: Container[int]) -> Fault:
    """Add the gradients of the previous step again, as if `zero_grad` had been left out.

    At several steps in a row they add up. Gradients are kept as backward computed them, before clipping; that takes as
    much memory as the gradients themselves, from one step before the first to the last.

    Args:
        model: the model.
        steps: the steps it happens at.
    """
    former: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def around(step: int) -> Iterator[None]:
        left, present = dict(former) if step in steps else {}, dict[nn.Parameter, Tensor]()
        former.clear()
        if step in steps and not left:
            raise MisuseError(f"missing-zero-grad at step {step}: no gradients were seen at the previous step")

        def collect(gradient: Tensor, parameter: nn.Parameter) -> Tensor | None:
            # why: with several micro-batches in one step, what is left over counts once; sync: while this fault is on
            fresh = parameter.grad is None or not bool(parameter.grad.any())
            added = gradient + left[parameter] if fresh and parameter in left else gradient
            present[parameter] = added.clone() if fresh or parameter not in present else present[parameter] + added
            return added if added is not gradient else None

        with hooked((p, partial(collect, parameter=p)) for p in trained(model)):
            yield
        if step + 1 in steps:
            former.update(present)

    return Fault(name="missing-zero-grad", steps=WithEves(steps), around=around)


OVERFLOW = 24  # as powers of two: a usual gradient of 1e-3 under a scale of 2^16 goes to 1e9
UNDERFLOW = -60  # the same goes to 6e-17


def fp16_overflow(model: nn.Module, *, steps: Container[int], power: int = OVERFLOW) -> Fault:
    """Run backward with gradients 2^power times too large. Pass the loss through `fault.loss` too.

    Args:
        model: the model.
        steps: the steps it happens at.
        power: exponent of the factor.
    """
    return _through("fp16-overflow", model, steps, 2.0**power)


def fp16_underflow(model: nn.Module, *, steps: Container[int], power: int = UNDERFLOW) -> Fault:
    """Run backward with gradients 2^-power times too small. Pass the loss through `fault.loss` too.

    Args:
        model: the model.
        steps: the steps it happens at.
        power: exponent of the factor.
    """
    return _through("fp16-underflow", model, steps, 2.0**power)


def _through(name: str, model: nn.Module, steps: Container[int], factor: float) -> Fault:
    def enlarge(slope: Tensor) -> Tensor:
        return slope * factor

    def reduce(gradient: Tensor) -> Tensor:
        return gradient / factor

    def change_loss(_: int, loss: Tensor) -> Tensor:
        same = loss.clone()
        same.register_hook(enlarge)  # type: ignore[no-untyped-call]
        return same

    return Fault(
        name=name,
        steps=steps,
        change_loss=change_loss,
        around=lambda _: hooked((p, reduce) for p in trained(model)),
    )


def scaled_lr(optimizer: Optimizer, *, steps: Container[int], factor: float) -> Fault:
    """Multiply the learning rate of every group by `factor`.

    Args:
        optimizer: whose learning rates change.
        steps: the steps it happens at; `since(300)` makes it last.
        factor: factor on the learning rates.
    """
    return _fault("scaled-lr", optimizer, steps, lambda _: factor)


def creeping_lr(optimizer: Optimizer, *, start: int, growth: float = 1.01) -> Fault:
    """Multiply the learning rate by `growth` once more with every step.

    Args:
        optimizer: whose learning rates grow.
        start: the first step.
        growth: factor per step.
    """
    return _fault("creeping-lr", optimizer, since(start), lambda step: _grown(growth, step - start + 1))


def _grown(growth: float, steps: int) -> float:
    try:
        return growth**steps
    except OverflowError:
        return math.inf


def _fault(name: str, optimizer: Optimizer, steps: Container[int], factor: Callable[[int], float]) -> Fault:
    @contextmanager
    def changed(step: int) -> Iterator[None]:
        """Each group's rate is put back after the step, unless someone else has set another meanwhile."""
        groups = list(optimizer.param_groups)
        before = [group["lr"] for group in groups]
        during = [lr * factor(step) for lr in before]
        for group, lr in zip(groups, during, strict=True):
            group["lr"] = lr
        try:
            yield
        finally:
            # why: looked up again, because loading an optimizer's state makes new groups
            for group, old, set_lr in zip(optimizer.param_groups, before, during, strict=False):
                if group["lr"] is set_lr or group["lr"] == set_lr:
                    group["lr"] = old

    return Fault(name=name, steps=steps, around=changed)


def scaled_moments(
    optimizer: Optimizer, *, steps: Container[int], factor: float = 0.0, moments: Sequence[str] = ()
) -> Fault:
    """Multiply the optimizer's moments by `factor` before the step, as after a checkpoint without them.

    Args:
        optimizer: whose state changes. Step counts stay.
        steps: the steps it happens at.
        factor: factor on the moments; 0 clears them.
        moments: names of some moments (`exp_avg_sq`, `momentum_buffer`); empty for all.
    """

    @contextmanager
    def around(step: int) -> Iterator[None]:
        found = [t for _, t in _moments(optimizer, moments)]
        if not found:
            known = sorted({name for name, _ in _moments(optimizer, ())})
            has = f"it has {', '.join(known)}" if known else "it has no state yet, or keeps none"
            wanted = " or ".join(moments) or "moments"
            raise MisuseError(f"moments-scale at step {step}: the optimizer has no {wanted}, {has}")
        with torch.no_grad():
            for tensor in found:
                tensor.mul_(factor)
        yield

    return Fault(name="moments-scale", steps=steps, around=around)


def _moments(optimizer: Optimizer, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    for slots in optimizer.state.values():
        for name, value in slots.items():
            # why: Adam counts its steps in a tensor of its own, which is no moment
            wanted = name in names if names else name != "step"
            if wanted and isinstance(value, Tensor) and value.is_floating_point():
                yield name, value
