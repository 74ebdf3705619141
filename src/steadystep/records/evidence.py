"""MEASURE, at a cadence: batches, outputs and parameters of a run. Evidence for a diagnosis, never an alarm."""

import math
from dataclasses import dataclass
from typing import final

from steadystep.records.record import JSON, Record


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPartStats(Record):
    """One tensor of the batches, over all batches that were measured."""

    __pydantic_config__ = JSON

    name: str
    """Where it is in the batch, as in `['label']` or `[1]`."""
    whole: bool
    """Whether its dtype holds whole numbers."""
    rows: int
    """Length of its first dimension in the last batch."""
    shape: tuple[int, ...] = ()
    """Its other dimensions."""
    mean: float
    """Mean of all values."""
    std: float
    """Standard deviation of all values."""
    smallest: float
    """Smallest value."""
    largest: float
    """Largest value."""
    variance: float
    """Mean variance of its features: the squared error of the best constant prediction."""
    within: float
    """Mean variance inside a batch, as a share of the variance over all batches; NaN for a constant."""
    deviation: float = math.nan
    """Mean absolute deviation from the median of the batch."""
    huber: float = math.nan
    """The mean of min(d²/2, |d| - 1/2) over these deviations d."""
    entropy: float = math.nan
    """Entropy in nats of its values, where all are whole numbers from 0 to 1,022; else NaN."""
    binary: float = math.nan
    """Mean entropy in nats of its features as probabilities, by their means: the best constant's cross-entropy.

    NaN where a value is not in [0, 1].
    """
    entropy_within: float = math.nan
    """Mean entropy inside a batch."""
    ignored: float = 0.0
    """Share of values that are -100, the label that losses ignore."""
    values: int = 0
    """How many different values there are, where all are whole numbers from 0 to 1,022; else 0."""
    repeated: bool = False
    """Whether every batch held the same values, in tensors of their own."""
    counted: int = 0
    """Rows of the first batches that were compared with each other."""
    distinct: int = 0
    """How many different rows there were among these."""
    marginal: float = math.nan
    """Entropy in nats of the mean row, where rows are shares that add up to 1; else NaN."""
    conditional: float = math.nan
    """Mean entropy in nats of a row, where rows are such shares; else NaN."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats(Record):
    """The tensors of the batches measured so far: of the first ones, then one at each probe."""

    __pydantic_config__ = JSON

    batches: int
    """Number of batches measured."""
    parts: tuple[BatchPartStats, ...]
    """At most six tensors, in the order of the batch."""
    shifted: bool = False
    """Whether the last tensor is the first one, moved by one position: the next token is predicted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OutputStats(Record):
    """What the model returned for one batch."""

    __pydantic_config__ = JSON

    step: int
    """The step of that forward pass."""
    shape: tuple[int, ...]
    """Shape of the output."""
    smallest: float
    """Smallest value."""
    largest: float
    """Largest value."""
    rms: float
    """Root mean square."""
    spread: float
    """Root mean square of the differences between the samples of the batch."""
    input_spread: float
    """The same of the first tensor that the model was called with; NaN where it is unknown."""
    input_rms: float = math.nan
    """Root mean square of the largest real tensor that the model was called with; NaN where it is unknown."""
    row_error: float
    """How far the sums over the last dimension are from 1, at most."""
    column_error: float
    """How far the sums over the batch are from 1, at most."""
    entropy: float
    """Mean entropy in nats of a softmax over the last dimension; NaN for a single column."""
    alignment: float = math.nan
    """Length of the mean of all rows as unit vectors: 1 where all point the same way; NaN for a single column."""
    distinct: float = math.nan
    """Share of samples whose output differs from that of the sample before."""
    calls: int = 1
    """How often the model was called in this forward pass."""
    losses: tuple[tuple[str, float], ...] = ()
    """Common losses of this output and the tensors of the batch, as in "mse of [1]"."""
    evaluating: bool = False
    """Whether the model was in evaluation mode, or all of its batch normalizations were."""
    evaluating_all: bool = True
    """With `evaluating`: the whole model was."""
    misread: tuple[str, ...] = ()
    """Recurrent and attention layers that read the batch as time."""
    outside: int = 0
    """Tensors that the output depends on and that require a gradient, but are in no model and in no optimizer."""
    untrained: tuple[str, ...] = ()
    """Parameters of the layer before an output, where all of them require a gradient and none is in an optimizer."""
    mistakes: tuple[tuple[str, str], ...] = ()
    """Faults that the loss functions called show by themselves, each with its evidence."""
    copied: str = ""
    """The feature of the input that is the target."""
    cuts: tuple[str, ...] = ()
    """Functions, such as `detach`, that took a tensor with a gradient out of the graph before the loss."""
    terms: int = 0
    """Loss functions that were called."""
    unheld: tuple[str, ...] | None = None
    """Parameters of the model that the loss depends on and that no optimizer holds; None where it is unknown."""
    faintest: float = math.nan
    """The smallest spread of any further output of the model, as a share of its size; NaN where there is none."""
    sharpest: float = math.nan
    """Mean largest share of the sharpest softmax inside of the model; NaN where there is none."""
    policy: bool = False
    """Whether log-probabilities of chosen actions were picked out of a softmax, without a loss function of torch."""
    severed: tuple[str, ...] = ()
    """Parameters in an optimizer that the forward pass computes with and that the loss does not depend on."""
    unlinked: tuple[str, ...] = ()
    """Parameters in an optimizer that were computed with under `no_grad` only."""
    ahead: str = ""
    """How a position of a sequence comes to see what it should predict, where it does."""
    activation: str = ""
    """The activation that made what the first loss function got, as in "softmax"."""
    kind: str = ""
    """Of the first loss function, where it is a plain mean."""
    target: BatchPartStats | None = None
    """What the first loss function compared with, over all probes so far."""
    penalized: int = 0
    """Parameters whose size itself was computed, as a penalty on them does."""
    compared: bool = False
    """Whether the loss compares outputs of samples with each other, as of two views, pairs or a list to be ranked."""
    first: bool = False
    """Whether it was the first forward pass of its step, and not the last, where a step has several."""
    passes: int = 1
    """Losses of that step, where it was the first of them; else 1."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStats(Record):
    """Size of each parameter before the first update."""

    __pydantic_config__ = JSON

    names: tuple[str, ...]
    """Names of the parameters."""
    rms: tuple[float, ...]
    """Root mean square of each."""
    std: tuple[float, ...] = ()
    """Standard deviation of each."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Structure(Record):
    """Which parameters are trained and how, as model and optimizer say at this moment."""

    __pydantic_config__ = JSON

    trained: tuple[str, ...] = ()
    """Parameters that an optimizer holds and that require a gradient."""
    sizes: tuple[int, ...] = ()
    """Number of elements of each of `trained`."""
    frozen: int = 0
    """Number of parameters with `requires_grad` off."""
    unheld: tuple[str, ...] = ()
    """Parameters that require a gradient and that no optimizer holds."""
    last: str = ""
    """The last parameter of the model."""
    announced: float = 0.0
    """The largest learning rate that a schedule has written into a group; 0 without one."""
    rate_zero: tuple[str, ...] = ()
    """Trained parameters whose group has a learning rate of 0."""
    weight_decay: float = 0.0
    """The largest of all groups."""
    decoupled: bool = False
    """Whether the decay is applied to the weights and not added to the gradient."""
    scale_free: bool = False
    """Whether every optimizer divides by the size of the gradient."""
    dropout: float = 0.0
    """The largest dropout probability."""
    dropouts: tuple[str, ...] = ()
    """Modules with that probability."""
    half: int = 0
    """Number of trained parameters in float16."""
    coarse: int = 0
    """Number of trained parameters in bfloat16."""
    norms: int = 0
    """Number of batch normalizations in training mode."""
    modes: int = 0
    """Number of modules that behave differently in evaluation mode."""
    fan_ins: tuple[int, ...] = ()
    """Inputs per unit of each of `trained` that is the weight of a linear or convolutional layer; else 0."""
    widths: tuple[int, ...] = ()
    """Last dimension of each of `trained` that is a matrix, for bare parameters and tables too; else 0."""
    table_rows: int = 0
    """Rows of the largest embedding."""
    last_frozen: bool = False
    """Whether the last parameter of the model has `requires_grad` off."""
    last_untrained: bool = False
    """Whether the values of that layer still are spread as torch draws them first."""
    norm_momentum: float = 0.0
    """The smallest momentum of batch normalizations in training mode; 0 without one."""
    momentum: float = 0.0
    """The largest of all groups that have one."""
