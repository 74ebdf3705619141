"""MEASURE: what one optimizer step looks like before it is taken."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from steadystep._deprecated import old_arguments, old_fields
from steadystep.records.record import JSON, Record

REPLICAS_EVERY = 20
"""Steps between two comparisons of what should be the same on all ranks; one before must still be remembered."""


WEIGHTS_EVERY = 20
"""Steps between two looks at the norms of the weights."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Record):
    """MEASURE, every so many steps: what costs too much to look at each time. Estimated from a sample of each tensor.

    It is taken around one update and travels with the look of the next one. Tuples align with `names`; one that does
    not apply (moments without Adam) is empty.
    """

    __pydantic_config__ = JSON

    step: int
    """The step whose update was measured."""
    names: tuple[str, ...] = ()
    weight_rms: tuple[float, ...] = ()
    """Root mean square of each parameter, after the update."""
    update_rms: tuple[float, ...] = ()
    """Root mean square of what the update changed."""
    second_moments: tuple[float, ...] = ()
    """Mean of Adam's v, corrected for its start from zero."""
    surprises: tuple[float, ...] = ()
    """RMS_t of StableAdamW (Wortsman et al. 2023): sqrt(mean(g² / max(v, eps²)))."""
    zero_shares: tuple[float, ...] = ()
    """Share of gradient elements that are exactly zero."""
    modules: tuple[str, ...] = ()
    """Activations that were watched; `dead` and `saturated` align with these."""
    dead: tuple[float, ...] = ()
    """Share of units that were zero for the whole batch."""
    saturated: tuple[float, ...] = ()
    """Share of values in the flat part of a sigmoid or tanh."""
    tables: tuple[str, ...] = ()
    """Embedding tables; `row_norms` aligns with these."""
    row_norms: tuple[float, ...] = ()
    """Norm of the longest row of each, after the update."""
    attentions: tuple[str, ...] = ()
    """Attention modules that were watched; `logit_bounds` aligns with these."""
    logit_bounds: tuple[float, ...] = ()
    """What no logit of the module exceeded: max|q| max|k| / sqrt(d_head), or its cap."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InputStats(Record):
    """What the first batches look like: evidence for a diagnosis, never an alarm."""

    __pydantic_config__ = JSON

    batches: int
    mean: float
    std: float
    largest: float
    """Largest absolute value."""
    constant_share: float
    """Share of features that did not vary."""
    scale_spread: float
    """Largest feature scale over the smallest non-zero one; 1.0 for one feature."""
    finite: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual(Record):
    """Batches under older weights and under the present ones, same random numbers. Asked only in trouble."""

    __pydantic_config__ = JSON

    step: int
    """The step whose weights were tried."""
    old_loss: float
    """The loss with those weights."""
    current_loss: float
    """The loss with the present ones."""
    lr: float = 0.0
    """The learning rate that was in use then."""
    batches: int = 1
    """Batches that the two losses are means of."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Signals(Record):
    """MEASURE: what one optimizer step looks like before it is taken."""

    __pydantic_config__ = JSON

    step: int
    """Attempts so far, from 0. A refused step counts: the data was consumed."""
    loss: float
    """Weighted mean over the micro-batches."""
    losses: tuple[float, ...] = ()
    """Each micro-batch's own loss, in the order they came."""
    grad_norm: float
    """Global L2 norm, after unscaling, before clipping."""
    norms: tuple[float, ...] = ()
    """L2 norm per gradient tensor, aligned with `names`."""
    names: tuple[str, ...] = ()
    bad_buffers: tuple[str, ...] = ()
    """Buffers that the forward pass made non-finite."""
    buffers: tuple[str, ...] = ()
    """Buffers that the forward pass writes; `buffer_peaks` aligns with these."""
    buffer_peaks: tuple[float, ...] = ()
    """The largest absolute value of each, as this step would leave it."""
    weights: tuple[str, ...] = ()
    """All parameters; `weight_norms` aligns with these."""
    weight_norms: tuple[float, ...] = ()
    """L2 norm of each, before the update. Every so many steps, and when something is not finite."""
    state: tuple[str, ...] = ()
    """What the optimizer holds beside the weights, and tensors of kept objects; `state_peaks` aligns with these."""
    state_peaks: tuple[float, ...] = ()
    """The largest absolute value of each. Every so many steps."""
    batch_rms: float | None = None
    """Root mean square of the first micro-batch, or of a sample of it (of ids its log1p); None without `batch=`."""
    lr: float = 0.0
    """The largest learning rate of all parameter groups."""
    announced_lr: float = 0.0
    """The largest learning rate that a schedule (the user's or the guard's) has announced; 0 when there is none."""
    scale: float = 1.0
    """The loss scale the gradients were computed with (1.0 without a scaler)."""
    scaled: bool = False
    """True when a loss scaler is at work: then a gradient overflow is its routine."""
    input_finite: bool | None = None
    """Whether the batch was finite; looked at only after trouble and only when `batch=` was given."""
    repeatable: bool = False
    """True when every micro-batch can be run again."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    loss_eps: float = 1.1920928955078125e-07
    """Machine epsilon of the loss's dtype: differences below eps * |loss| are rounding."""
    refused_in_a_row: int = 0
    """Updates refused directly before this one."""
    probe: Probe | None = None
    """Heavier signals, at a cadence."""
    inputs: InputStats | None = None
    """Only at the step by which the first batches have been seen, and only when `batch=` is given."""
    counterfactual: Counterfactual | None = None
    bad_ranks: tuple[int, ...] = ()
    """In a distributed run: the ranks whose own loss or batch is not finite."""
    odd_replicas: tuple[str, ...] = ()
    """In a distributed run: weights that are not the same on all ranks, each as "name on rank 3"."""
    healthy_rank: int | None = None
    """With `odd_replicas`: a rank whose weights are those of most ranks, where most agree."""

    @property
    def all_finite(self) -> bool:
        """Nothing in this look is NaN or infinite (metrics are the user's and do not count)."""
        # why: the difference of a number and itself is 0 exactly when it is finite; one test instead of three
        total = self.loss + self.grad_norm + self.lr
        return (total - total == 0.0 or self.is_finite) and not self.bad_buffers

    @property
    def is_finite(self) -> bool:
        """Loss, gradients and learning rate are; buffers do not count."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm) and math.isfinite(self.lr)

    @property
    def bad_tensors(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient is not finite."""
        return tuple(n for n, v in zip(self.names, self.norms, strict=True) if not math.isfinite(v))

    @property
    def bad_micro_batches(self) -> tuple[int, ...]:
        """Positions in the group of the micro-batches whose loss is not finite."""
        return tuple(i for i, v in enumerate(self.losses) if not math.isfinite(v))


old_fields(Counterfactual)
old_arguments(Counterfactual)
old_fields(Signals)
