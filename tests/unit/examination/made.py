"""Observations made by hand: of an unremarkable job, with one thing different."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from steadystep.examination.observation import Observation
from steadystep.examination.parameters import Parameters
from steadystep.examination.passes import Pass, record_losses
from steadystep.examination.workbench import Trial, Workbench
from tests.unit.examination.jobs import Job, classes

PARAMETERS = Parameters(
    trainable=300, total=300, held=4, norms={"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, sizes=dict.fromkeys("abcd", 0.1)
)


def made_pass(
    inputs: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, **changes: Any
) -> Pass:
    """With the identity for a model."""
    recorder, value = record_losses(lambda batch: loss(*batch), (inputs, targets))
    plain = Pass(
        inputs={"[0]": inputs},
        targets={"[1]": targets},
        given=(inputs,),
        modules=(nn.Identity(),),
        outputs=(inputs,),
        loss=float(value),
        calls=tuple(recorder.calls),
        differences=tuple(recorder.differences),
    )
    return replace(plain, **changes)


def made_observation(
    batches: Sequence[tuple[Tensor, Tensor]] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    **changes: Any,
) -> Observation:
    """What nothing is wrong with, but for `changes`."""
    given = classes(number=4, inputs=4) if batches is None else batches
    plain = Observation(
        passes=[made_pass(x, y, loss) for x, y in given],
        parameters=PARAMETERS,
        batches=given,
        rates=None,
        on_input=0.5,
        on_input_fresh=0.5,
        spread=1.0,
        spread_fresh=1.0,
        on_neighbors=0.0,
        on_later=None,
        own_target=1.0,
        certainty=False,
        reached_fresh=frozenset("abcd"),
        dead={},
        saturated={},
    )
    return replace(plain, **changes)


def made_trial(*before_after: float, **changes: Any) -> Trial:
    """From one loss to another, the same in three batches."""
    before, after = before_after
    plain = Trial(name="made", what="made", before=(before,) * 3, after=(after,) * 3, losses=(before, after))
    return replace(plain, **changes)


def bench_of(job: Job, **options: Any) -> Workbench:
    settings: dict[str, Any] = {"num_steps": 10, "max_grad_norm": None, "seed": 0, **options}
    return Workbench(job.model, job.optimizer, job.loss, job.batches, **settings)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
