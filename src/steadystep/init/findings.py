"""What the numbers of `check_init` mean.

The limits were set on the zoo in tests/unit/init/test_check.py: healthy models of many kinds stay far from them. They
are ratios wherever that is possible, because the scale of inputs and targets is the user's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from steadystep.records import Finding, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScale:
    """Measurements of one layer. None where there was nothing to measure."""

    name: str
    """Path of the layer in the model."""
    kind: str
    """Class of the layer."""
    output_rms: float
    """Root mean square of the output."""
    input_zeros: float | None
    """Share of exact zeros in the input, where other layers computed it."""
    input_saturated: float | None
    """Share of inputs in the flat part of a tanh or sigmoid, where they can only come from one."""
    output_grad_norm: float | None
    """L2 norm of the loss's gradient with respect to the output."""
    pull: float | None
    """Relative change of the loss per relative change of the weight: |gradient| |weight| / |loss|."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InitReport:
    """Result of `check_init`. `str(report)` is a table; `findings` is empty for a model that is ready to train."""

    loss: float
    """Loss of the batch."""
    expected_loss: float | None
    """Logarithm of the number of classes, where that is known."""
    layers: tuple[LayerScale, ...]
    """Scale of each layer, in the order of the forward pass."""
    unused: tuple[str, ...]
    """Parameters that the loss does not depend on in this batch."""
    findings: tuple[Finding, ...]
    """What is wrong with the initialization."""

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        expected = "" if self.expected_loss is None else f" (ln C = {self.expected_loss:.3f})"
        lines = [f"loss {self.loss:.3f}{expected}, {len(self.findings) or 'no'} findings"]
        lines += [f"  {f.severity}: {f.what}: {', '.join(f.where)}".rstrip(": ") for f in self.findings]
        width = max(len(name) for name in ("layer", *(layer.name for layer in self.layers)))
        lines.append(f"  {'layer'.ljust(width)}  {'output':>9}  {'gradient':>9}  {'pull':>9}")
        for layer in self.layers:
            numbers = (layer.output_rms, layer.output_grad_norm, layer.pull)
            lines.append(f"  {layer.name.ljust(width)}  " + "  ".join(_number(n) for n in numbers))
        return "\n".join(lines)


def _number(value: float | None) -> str:
    return f"{'-':>9}" if value is None else f"{value:9.2e}"


EXPLODING_OUTPUT = 1e3  # times the scale of the input (or 1); healthy stacks of 50 layers stay under 10
EXPLODING_PULL = 1e4  # healthy: under 50 at width 256, growing with its root
VANISHING = 1e-5  # gradient at the first layer over that at the last; healthy: 1e-3 and more
DEAD = 0.98  # of a layer's inputs are exactly 0; ReLU alone gives 0.5, with heavy dropout 0.95
SATURATED = 0.5  # of a layer's inputs are where tanh or sigmoid are flat (DeepDiagnosis); healthy: 0
LOSS_ABOVE = 3.0  # nats above ln C; logits of variance 2, as kaiming gives, cost 1
LOSS_BELOW = 0.5  # of ln C; untrained weights cannot know the answer


def find(
    layers: Sequence[LayerScale], *, loss: float, expected_loss: float | None, input_scale: float
) -> tuple[Finding, ...]:
    """Every fault at most once, naming the layers that show it."""
    bad = _non_finite(layers, loss)
    return (
        *bad,
        *_exploding(layers, EXPLODING_OUTPUT * input_scale),
        *(() if bad else _vanishing(layers)),
        *_over(layers, "input_zeros", "dead", DEAD, "almost all inputs of the layer are 0"),
        *_over(layers, "input_saturated", "saturated", SATURATED, "the activation before the layer is saturated"),
        *_initial_loss(loss, expected_loss),
    )


def _non_finite(layers: Sequence[LayerScale], loss: float) -> tuple[Finding, ...]:
    outputs = [layer for layer in layers if not math.isfinite(layer.output_rms)]
    if outputs:
        what = "the output is non-finite, first here"
        return (_finding("non-finite", outputs[0].output_rms, math.inf, what, outputs[:1], "critical"),)
    if not math.isfinite(loss):
        return (_finding("non-finite", loss, math.inf, "the loss is non-finite", (), "critical"),)
    where = [layer for layer in layers if layer.output_grad_norm is not None and not _gradient_is_finite(layer)]
    if where:
        what = "the gradient is non-finite, first here in the backward pass"
        return (_finding("non-finite", where[-1].output_grad_norm or 0.0, math.inf, what, where[-1:], "critical"),)
    return ()


def _exploding(layers: Sequence[LayerScale], limit: float) -> tuple[Finding, ...]:
    grown = [layer for layer in layers if limit < layer.output_rms < math.inf]
    if grown:
        return (
            _finding(
                "exploding", max(s.output_rms for s in grown), limit, "the outputs grow from layer to layer", grown
            ),
        )
    steep = [layer for layer in layers if layer.pull is not None and layer.pull > EXPLODING_PULL]
    if steep:
        value = max(layer.pull or 0.0 for layer in steep)
        return (_finding("exploding", value, EXPLODING_PULL, "the gradient is large relative to the weights", steep),)
    return ()


def _vanishing(layers: Sequence[LayerScale]) -> tuple[Finding, ...]:
    # why: gradients of exactly 0 come from weights of exactly 0, which people use on purpose
    reached = [layer for layer in layers if layer.pull is not None and layer.output_grad_norm]
    if not reached:
        return ()
    last = reached[-1].output_grad_norm or 0.0
    ratio = (reached[0].output_grad_norm or 0.0) / last
    if ratio >= VANISHING:
        return ()
    weak = [layer for layer in reached if (layer.output_grad_norm or 0.0) < VANISHING * last]
    return (_finding("vanishing", ratio, VANISHING, "the gradient vanishes before the first layers", weak),)


def _over(layers: Sequence[LayerScale], field: str, name: str, limit: float, what: str) -> tuple[Finding, ...]:
    shares = [(getattr(layer, field), layer) for layer in layers if layer.pull is not None]
    over = [(share, layer) for share, layer in shares if share is not None and share > limit]
    if not over:
        return ()
    return (_finding(name, max(share for share, _ in over), limit, what, [layer for _, layer in over]),)


def _initial_loss(loss: float, expected: float | None) -> tuple[Finding, ...]:
    if expected is None or not math.isfinite(loss):
        return ()
    if loss > expected + LOSS_ABOVE:
        what = (
            "the loss is far above ln C before training: normalize the inputs or initialize the last layer with "
            "smaller weights"
        )
        return (_finding("initial-loss", loss, expected + LOSS_ABOVE, what, ()),)
    if loss < LOSS_BELOW * expected:
        what = (
            "the loss is far below ln C before training: is the target in the input, or is the model already trained?"
        )
        return (_finding("initial-loss", loss, LOSS_BELOW * expected, what, ()),)
    return ()


def _gradient_is_finite(layer: LayerScale) -> bool:
    # An infinite pull is a product that left fp32: steep, not broken.
    return math.isfinite(layer.output_grad_norm or 0.0) and not math.isnan(layer.pull or 0.0)


def _finding(
    name: str, value: float, limit: float, what: str, where: Sequence[LayerScale], severity: Severity = "warn"
) -> Finding:
    return Finding(
        detector=f"init-{name}",
        step=0,
        severity=severity,
        value=value,
        limit=limit,
        what=what,
        where=tuple(layer.name for layer in where),
    )
