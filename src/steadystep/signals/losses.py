"""Which loss a run is trained with, and whether it fits what it is called with.

A common loss of an output and its targets that equals the loss of the step tells what it is.
"""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from steadystep.signals.loss_calls import DISTANCES, ActivationOrigin, LossCall

OF = " of "
"""Between the kind of a loss and the tensor that it is of."""
KINDS = {
    "cross_entropy": "cross-entropy",
    "nll_loss": "nll",
    "binary_cross_entropy_with_logits": "bce with logits",
    "binary_cross_entropy": "bce",
    "mse_loss": "mse",
    "l1_loss": "l1",
    "huber_loss": "huber",
    "smooth_l1_loss": "huber",
    "soft_margin_loss": "soft margin",
    "hinge_embedding_loss": "hinge embedding",
    "poisson_nll_loss": "poisson",
    "cosine_embedding_loss": "cosine embedding",
    "margin_ranking_loss": "margin ranking",
    "kl_div": "kl",
}
"""What the loss functions of torch are called here."""
_IGNORED = -100
_COPY = 0.9999  # correlation over a batch
_MOST_COPIES = 1 << 12  # features that are compared with the target
_MOST_ROWS = 1 << 14
_FEWEST = 3  # batches


def losses_of(output: Tensor, batch: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Losses of the output and each tensor of the batch that fits, as "kind of name"."""
    found: dict[str, Tensor] = {}
    values = output.float()
    for name, target in batch:
        if target.device != output.device:
            continue
        more: dict[str, Tensor] = {}
        if not target.is_floating_point():
            more |= _of_classes(values, target)
        if target.numel() == output.numel():
            more |= _of_numbers(values.flatten(), target.flatten().float())
        if values.dim() == 2 and values.shape[1] == 1 < len(values) and target.shape == values.shape[:1]:
            more["broadcast mse"] = _broadcast(values, target.float())
        found |= {f"{kind}{OF}{name}": loss for kind, loss in more.items()}
    return found


def _of_classes(values: Tensor, target: Tensor) -> dict[str, Tensor]:
    if values.dim() < 2 or target.dtype is torch.bool:
        return {}
    if target.shape == (len(values), *values.shape[2:]):
        values = values.movedim(1, -1)
    classes = values.shape[-1]
    if classes < 2 or target.numel() * classes != values.numel():
        return {}
    values, target = values.reshape(-1, classes), target.reshape(-1).long()
    counted = target != _IGNORED
    # why clamped: a label out of range would stop a GPU
    chosen = target.clamp(0, classes - 1).unsqueeze(1)

    known = torch.where(((target >= 0) & (target < classes)) | ~counted, 0.0, torch.nan).sum()

    def mean(each: Tensor) -> Tensor:
        picked = each.gather(1, chosen).squeeze(1)
        return known - torch.where(counted, picked, 0.0).sum() / counted.sum().clamp(min=1)

    return {
        "cross-entropy": mean(torch.log_softmax(values, 1)),
        "nll": mean(values),
        "nll from probabilities": mean(values.clamp(min=1e-38).log()),
    }


def _of_numbers(values: Tensor, target: Tensor) -> dict[str, Tensor]:
    gap = values - target
    squares = gap.square()
    # bounded as torch's own
    yes, no = torch.stack((values, 1.0 - values)).clamp_(min=0.0).log_().clamp_(min=-100.0).unbind()
    return {
        "bce with logits": functional.binary_cross_entropy_with_logits(values, target),
        "bce": -(target * yes + (1.0 - target) * no).mean(),
        "mse": squares.mean(),
        "l1": gap.abs().mean(),
        "huber": functional.huber_loss(values, target),
        "sum of squares": squares.sum(),
    }


def _broadcast(values: Tensor, target: Tensor) -> Tensor:
    """The mean of (o_i - t_j)² over all pairs."""
    return values.square().mean() - 2.0 * values.mean() * target.mean() + target.square().mean()


def is_distribution(values: Tensor, dim: int) -> bool:
    """Whether the numbers along a dimension are shares that add up to one."""
    if not values.is_floating_point() or values.dim() <= dim or values.shape[dim] < 2:
        return False
    near = torch.isclose(values.sum(dim), torch.ones((), dtype=values.dtype, device=values.device), atol=1e-3)
    return bool((values >= 0).all() and near.all())  # sync: examined


def without_ignored(call: LossCall) -> Tensor:
    """The target of a call, with the label that it ignores as the usual one, -100."""
    assert call.target is not None
    ignored = call.options.get("ignore_index", _IGNORED)
    if ignored == _IGNORED or call.target.is_floating_point():
        return call.target
    return torch.where(call.target == ignored, _IGNORED, call.target)


def has_known_level(call: LossCall) -> bool:
    """Whether its level is known: not that of a divergence that is averaged over the classes as well."""
    return call.name != "kl_div" or (
        call.options.get("reduction") == "batchmean" and not call.options.get("log_target")
    )


def class_dim(given: Tensor) -> int:
    """Where `cross_entropy`, `nll_loss` expect the classes."""
    return 1 if given.dim() > 1 else 0


def is_log_distribution(values: Tensor, dim: int) -> bool:
    """Whether they are logarithms of such shares."""
    return values.is_floating_point() and is_distribution(values.exp(), dim)


_BOUNDED = ("sigmoid", "softmax")
_UNFIT = (*_BOUNDED, "relu", "tanh")
WRONG_LOSS, SOFTMAX_AXIS = "wrong-loss", "softmax-axis"
INNER_SOFTMAX = "inner softmax-axis"
"""A softmax inside of the model that cannot be meant: a fault where the run does not learn."""


def mistakes(
    calls: Sequence[LossCall],
    differences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    softmaxes: Sequence[ActivationOrigin] = (),
    size: int = 0,
) -> Iterator[tuple[str, str]]:
    """What shapes and the functions called show to be wrong, as fault and evidence: no number is read.

    Args:
        calls: of loss functions.
        differences: shapes of subtractions whose result is larger than both sides.
        softmaxes: all of the pass.
        size: samples of the batch; 0 where it is unknown.
    """
    for made in softmaxes:
        inner = _inner_axis(made, size)
        if inner:
            yield INNER_SOFTMAX, inner
    for call in calls:
        over = _wrong_axis(call)
        if over:
            yield SOFTMAX_AXIS, over
        twice = _activation_twice(call)
        if twice:
            yield WRONG_LOSS, twice
    pairs = [
        (tuple(c.given.shape), tuple(c.target.shape)) for c in calls if c.name in DISTANCES and c.target is not None
    ]
    for left, right in (*pairs, *differences):
        if _spreads(left, right):
            yield (
                WRONG_LOSS,
                f"outputs and targets of shapes {left} and {right}: broadcasting compares every output with every "
                "target, and the best answer is their mean",
            )


def _spreads(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """(N, 1) against (N,), or the same with more dimensions in front."""
    short, long = sorted((left, right), key=len)
    return bool(short) and short[0] > 1 and long in ((*short, 1), (short[0], 1, *short[1:]))


def _inner_axis(made: ActivationOrigin, size: int) -> str:
    """A softmax anywhere in the model that is over one element, or over the samples."""
    shape = made.shape
    if made.dim is None or len(shape) < 2:
        return ""
    if shape[made.dim] == 1:
        return f"a {made.name} over dimension {made.dim} of shape {shape}, which has one element, gives 1 everywhere"
    if made.dim == 0 and shape[0] == size != shape[1]:
        return f"a {made.name} over dimension 0 of shape {shape}: over the samples of the batch"
    return ""


def _wrong_axis(call: LossCall) -> str:
    """A softmax over one unit, over the samples, or over positions instead of classes."""
    made = call.origin
    while made is not None and "softmax" not in made.name:
        made = made.before
    if made is None or made.dim is None:
        return ""
    shape, dims = made.shape, len(made.shape)
    if shape[made.dim] == 1:
        return f"a {made.name} over a single unit is constant (shape {shape}, dim {made.dim})"
    over_batch = made.dim == 0 and dims > 1
    if dims == 2 and shape[0] == shape[1] and call.target is not None and call.target.dim() == 1:
        over_batch = False  # similarities of a batch with itself may be normalized either way
    over_other = call.name in ("cross_entropy", "nll_loss") and made.dim not in (dims - 1, 1)
    if over_batch or over_other:
        return f"a {made.name} over dimension {made.dim} of shape {shape}: over samples instead of classes"
    return ""


def _activation_twice(call: LossCall) -> str:
    """Loss functions that apply an activation themselves, or need another one."""
    made = call.origin
    if made is None:
        return ""
    if call.name == "cross_entropy" and made.name in _BOUNDED:
        return f"cross_entropy applies a softmax to what a {made.name} has made"
    if call.name == "binary_cross_entropy_with_logits" and made.name in (*_BOUNDED, "logsigmoid", "log_softmax"):
        return f"binary_cross_entropy_with_logits applies a sigmoid to what a {made.name} has made"
    if call.name == "binary_cross_entropy" and made.before is not None and made.before.name in _UNFIT:
        return f"binary_cross_entropy gets the {made.name} of a {made.before.name}"
    if call.name in ("nll_loss", "kl_div") and made.name in (*_UNFIT, "softplus"):
        return f"{call.name} wants log-probabilities and gets what a {made.name} has made"
    return ""


@final
class Copies:
    """Whether a feature of what the model is given is what it should predict; of labels, up to a factor and an offset.

    Of a sequence only the last position counts: to recall an earlier one is a task.
    """

    def __init__(self) -> None:
        self._least: Tensor | None = None
        self._seen = 0
        self._none = False

    @torch.no_grad()
    def add(self, given: Tensor, target: Tensor) -> None:
        """One more batch."""
        if self._none:
            return
        sequence = given.dim() == 3
        given = given[:, -1] if sequence else given
        if not given.is_floating_point() or given.dim() != 2 or len(given) != len(target) or len(given) < 8:
            return
        given, target = given[:_MOST_ROWS], target[:_MOST_ROWS]
        rows, wanted = given.float(), target.reshape(len(target), -1).float()
        if wanted.shape[1] != 1 or not (1 if sequence else 2) <= rows.shape[1] <= _MOST_COPIES:
            return
        # why equal: a noise-free toy may be a multiple of one feature; a label that is one is no accident
        equal = ((rows - wanted).abs().amax(0) <= 1e-6 * wanted.abs().amax()).float() * (wanted.std() > 0.0)
        labels = (wanted == wanted.round()).all()
        # one class against the others: labels may be given as a column for each
        one = (wanted == wanted.amin()).float()
        rows, wanted, one = rows - rows.mean(0), wanted - wanted.mean(0), one - one.mean(0)
        related = torch.maximum(_correlation(rows, wanted), _correlation(rows, one))
        found = torch.where(labels, related, equal)
        if self._least is None or self._least.shape == found.shape:
            self._least = found if self._least is None else torch.minimum(found, self._least)
            self._seen += 1

    def pending(self, home: torch.device) -> Tensor:
        """The correlation of the feature that goes best with the target in every batch, and its place."""
        if self._least is None or self._seen < _FEWEST or self._none:
            return torch.zeros(2, device=home)
        best = self._least.max(0)
        return torch.stack((best.values, best.indices.to(best.values.dtype))).float().to(home)

    def read(self, correlation: float, place: float) -> str:
        """In words; empty where there is none, and then there never will be: the least of all batches counts."""
        self._none = self._seen >= _FEWEST and not correlation >= _COPY
        return f"feature {place:.0f} of the input" if correlation >= _COPY else ""


def _correlation(rows: Tensor, wanted: Tensor) -> Tensor:
    """Of each centered column with one."""
    sizes = rows.square().sum(0) * wanted.square().sum(0)
    return (rows * wanted).sum(0).abs() * sizes.clamp(min=1e-30).rsqrt()
