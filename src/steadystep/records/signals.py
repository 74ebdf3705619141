"""MEASURE: what one optimizer step looks like before it is taken."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from steadystep._deprecated import old_arguments, old_fields
from steadystep.records.evidence import BatchStats, OutputStats, WeightStats
from steadystep.records.record import JSON, Record

REPLICAS_EVERY = 20
"""Steps between two comparisons of the weights on all ranks."""


WEIGHTS_EVERY = 20
"""Steps between two measurements of weight norms and optimizer state."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Record):
    """MEASURE, at a cadence: signals that are too expensive for every step, estimated from a sample of each tensor.

    Measured around one update and delivered with the signals of the next one. Tuples align with `names`; one that does
    not apply (moments without Adam) is empty.
    """

    __pydantic_config__ = JSON

    step: int
    """The step whose update was measured."""
    names: tuple[str, ...] = ()
    """Names of the parameters."""
    weight_rms: tuple[float, ...] = ()
    """Root mean square of each parameter, after the update."""
    update_rms: tuple[float, ...] = ()
    """Root mean square of the update."""
    second_moments: tuple[float, ...] = ()
    """Mean of Adam's v, bias-corrected."""
    surprises: tuple[float, ...] = ()
    """RMS_t of StableAdamW (Wortsman et al. 2023): sqrt(mean(g² / max(v, eps²)))."""
    zero_shares: tuple[float, ...] = ()
    """Share of gradient elements that are exactly zero."""
    modules: tuple[str, ...] = ()
    """Activation modules measured; `dead` and `saturated` align with these."""
    dead: tuple[float, ...] = ()
    """Share of units that were zero for the whole batch."""
    saturated: tuple[float, ...] = ()
    """Share of values in the flat part of a sigmoid or tanh."""
    tables: tuple[str, ...] = ()
    """Embedding tables; `row_norms` aligns with these."""
    row_norms: tuple[float, ...] = ()
    """Norm of the longest row of each table, after the update."""
    attentions: tuple[str, ...] = ()
    """Attention modules measured; `logit_bounds` aligns with these."""
    logit_bounds: tuple[float, ...] = ()
    """Upper bound of the logits of each module: max|q| max|k| / sqrt(d_head), or its cap."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InputStats(Record):
    """Statistics of the first batches: evidence for a diagnosis, never an alarm."""

    __pydantic_config__ = JSON

    batches: int
    """Number of batches measured."""
    mean: float
    """Mean of all values."""
    std: float
    """Standard deviation of all values."""
    largest: float
    """Largest absolute value."""
    constant_share: float
    """Share of features that did not vary."""
    scale_spread: float
    """Largest feature scale divided by the smallest non-zero one; 1.0 for one feature."""
    finite: bool
    """Whether all values are finite."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BitFlip(Record):
    """One bit of a weight, of the optimizer state or of a buffer that changed by itself between two updates."""

    __pydantic_config__ = JSON

    tensor: str
    """Name of the parameter or buffer, or as in "exp_avg of layers.0.weight"."""
    index: int
    """Position of the element in memory order; the order of `tensor.flatten()` where it is contiguous."""
    bit: int
    """Position of the bit in the element; 0 is the least significant."""
    repaired: bool
    """Whether it was put back."""
    used: bool = True
    """Whether the gradients of this step were computed with it."""
    rank: int | None = None
    """The rank that holds it, in a distributed run."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Miscomputation(Record):
    """One rank on which the same step, computed again, gave another result."""

    __pydantic_config__ = JSON

    rank: int
    """The rank; 0 in a single process."""
    host: str
    """Name of its machine."""
    tensors: tuple[str, ...]
    """What differs, such as "loss" or "gradient of layers.0.weight"; the first eight."""
    count: int
    """Number of tensors that differ."""
    bits: int
    """Number of bits that differ in all of them."""
    runs: int
    """How often the step was computed."""
    persistent: bool
    """Whether no two results agreed, or it has happened three times in 100 checks; otherwise it was transient."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual(Record):
    """Loss of the current batches under earlier and under current weights, with the same random numbers.

    Measured only when a finding needs it.
    """

    __pydantic_config__ = JSON

    step: int
    """The step whose weights were tried."""
    old_loss: float
    """Loss with those weights."""
    current_loss: float
    """Loss with the current weights."""
    lr: float = 0.0
    """Learning rate at that step."""
    batches: int = 1
    """Number of batches that the two losses are means of."""
    rollouts: bool = False
    """Whether these are rollouts of a policy: each loss is the negative of what they earned."""
    closing: bool = False
    """Whether the gap is too small for a rollback or closes by itself: what pays is a replay that goes better."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Signals(Record):
    """MEASURE: the measurements of one optimizer step, before the update."""

    __pydantic_config__ = JSON

    step: int
    """Steps tried so far, from 0. A refused step counts: its data was consumed."""
    loss: float
    """Weighted mean over the micro-batches."""
    losses: tuple[float, ...] = ()
    """Loss of each micro-batch, in order."""
    grad_norm: float
    """Global L2 norm, after unscaling, before clipping."""
    norms: tuple[float, ...] = ()
    """L2 norm of each gradient tensor, aligned with `names`."""
    names: tuple[str, ...] = ()
    """Names of the parameters that have a gradient."""
    bad_buffers: tuple[str, ...] = ()
    """Buffers that the forward pass made non-finite."""
    buffers: tuple[str, ...] = ()
    """Buffers that the forward pass writes; `buffer_peaks` aligns with these."""
    buffer_peaks: tuple[float, ...] = ()
    """Largest absolute value of each buffer after this step."""
    weights: tuple[str, ...] = ()
    """Names of all parameters; `weight_norms` aligns with these."""
    weight_norms: tuple[float, ...] = ()
    """L2 norm of each parameter, before the update. Measured at a cadence, and when something is not finite."""
    state: tuple[str, ...] = ()
    """Tensors of the optimizer state and of kept objects; `state_peaks` aligns with these."""
    state_peaks: tuple[float, ...] = ()
    """Largest absolute value of each. Measured at a cadence."""
    batch_rms: float | None = None
    """Root mean square of the first micro-batch, or of a sample of it (of ids their log1p); None without `batch=`."""
    lr: float = 0.0
    """Largest learning rate of all parameter groups."""
    announced_lr: float = 0.0
    """Largest learning rate that a schedule (the user's or the guard's) has announced; 0 if there is none."""
    scale: float = 1.0
    """Loss scale of these gradients; 1.0 without a scaler."""
    scaled: bool = False
    """Whether a loss scaler is active: it handles gradient overflows itself."""
    input_finite: bool | None = None
    """Whether the batch was finite; checked only after a fault, and only with `batch=`."""
    repeatable: bool = False
    """Whether every micro-batch can be run again."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Scalars given as `metrics=`."""
    loss_eps: float = 1.1920928955078125e-07
    """Machine epsilon of the loss's dtype: differences below eps * |loss| are rounding."""
    refused_in_a_row: int = 0
    """Number of updates refused directly before this one."""
    probe: Probe | None = None
    """Signals measured at a cadence, if this step has them."""
    inputs: InputStats | None = None
    """Statistics of the first batches; only at the step that completes them, and only with `batch=`."""
    batch: BatchStats | None = None
    """Statistics of the batches measured so far; at a cadence, and only with `batch=`."""
    outputs: OutputStats | None = None
    """What the model returned at this step; at a cadence, and only for a closure that calls the model."""
    initial: WeightStats | None = None
    """Size of the weights before the first update; only at the first step."""
    counterfactual: Counterfactual | None = None
    """Loss under earlier weights, where a finding asked for it."""
    bad_ranks: tuple[int, ...] = ()
    """In a distributed run: ranks whose own loss or batch is not finite."""
    odd_replicas: tuple[str, ...] = ()
    """In a distributed run: weights that differ between ranks, each as "name on rank 3"."""
    bit_flips: tuple[BitFlip, ...] = ()
    """Bits that changed by themselves since the last update, where they were checked."""
    miscomputations: tuple[Miscomputation, ...] = ()
    """Ranks on which this step was computed wrongly, where it was computed again."""
    healthy_rank: int | None = None
    """With `odd_replicas`: a rank whose weights agree with those of most ranks, where most agree."""

    @property
    def all_finite(self) -> bool:
        """Whether everything measured is finite. Metrics do not count: they are the user's."""
        # why: the difference of a number and itself is 0 exactly when it is finite; one test instead of three
        total = self.loss + self.grad_norm + self.lr
        return (total - total == 0.0 or self.is_finite) and not self.bad_buffers

    @property
    def is_finite(self) -> bool:
        """Whether loss, gradients and learning rate are finite. Buffers do not count."""
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
