"""What an optimizer remembers, changed behind its back."""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadystep.errors import MisuseError
from steadystep.faults.fault import Fault


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
            has = f"it has {', '.join(known)}" if known else "it has none yet, or never will"
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
