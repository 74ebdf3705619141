"""Gradients of the step before that nobody cleared."""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from steadystep.errors import MisuseError
from steadystep.faults.fault import Fault
from steadystep.faults.hooks import hooked, trained
from steadystep.faults.steps import WithEves


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
            raise MisuseError(f"missing-zero-grad at step {step}: no gradients were seen at the step before")

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
