"""What `check_init` saw."""

from dataclasses import dataclass
from typing import final

from steadystep.records import Finding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScale:
    """One layer, in the order the forward pass reached it. None where there was nothing to measure."""

    name: str
    kind: str
    output_rms: float
    """Root mean square of the output."""
    input_zeros: float | None
    """Share of exact zeros in what the layer was given, when that was computed by other layers."""
    input_saturated: float | None
    """Share of its inputs that sit in the flat part of a tanh or sigmoid, when they can only come from one."""
    output_grad_norm: float | None
    """L2 norm of the loss's gradient by the output."""
    pull: float | None
    """Relative change of the loss per relative change of the weight: |gradient| |weight| / |loss|."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InitReport:
    """`str(report)` is a table to read; `findings` is empty for a model that is ready to train."""

    loss: float
    expected_loss: float | None
    """ln(number of classes), where that is known."""
    layers: tuple[LayerScale, ...]
    unused: tuple[str, ...]
    """Parameters the loss does not depend on in this batch."""
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Nothing was found."""
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
