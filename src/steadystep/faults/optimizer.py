"""Gradients that come out wrong."""

import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.errors import MisuseError, UnsupportedError
from steadystep.faults.fault import Element, Fault, WithEves, hooked, pick_layer, put, since, trained


def bad_gradient(
    model: nn.Module,
    *,
    steps: Container[int],
    value: float = math.nan,
    parameter: str | int | None = 0,
    element: int | None = 0,
    seed: int = 0,
) -> Fault:
    """One element of one parameter's gradient becomes `value`, NaN unless told otherwise.

    `parameter` and `element` are drawn from `seed` and the step where they are None. Under a loss scaler a finite
    `value` is divided by the scale like everything else.
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
    """All gradients times `factor`, or those of one layer; -1 turns descent into ascent.

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
    """The gradients of the former step are added again, as if `zero_grad` had been left out before this one.

    At several steps in a row they pile up. They are kept as backward computed them, before clipping; that takes as much
    memory as the gradients themselves from one step before the first to the last.
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
    """Gradients go through backward 2^power times too large. Give the loss through `fault.loss` too."""
    return _through("fp16-overflow", model, steps, 2.0**power)


def fp16_underflow(model: nn.Module, *, steps: Container[int], power: int = UNDERFLOW) -> Fault:
    """Gradients go through backward 2^-power times too small. Give the loss through `fault.loss` too."""
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
    """The learning rate of every group times `factor`; `since(300)` as steps makes it last."""
    return _fault("scaled-lr", optimizer, steps, lambda _: factor)


def creeping_lr(optimizer: Optimizer, *, start: int, growth: float = 1.01) -> Fault:
    """From `start` on the learning rate is multiplied by `growth` once more with every step."""
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
    """Moments times `factor` before the step, 0 unless told otherwise: a checkpoint that came back without them.

    `moments` names some of them (`exp_avg_sq`, `momentum_buffer`); without it all are meant. Step counts stay.
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
