"""One parameter of a model, by name or by position."""

from torch import nn

from steadystep.errors import MisuseError


def pick(model: nn.Module, which: str | int) -> tuple[str, nn.Parameter]:
    """Its name and itself; raises `MisuseError` when there is none."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if isinstance(which, int) and -len(named) <= which < len(named):
        return named[which]
    for name, parameter in named:
        if name == which:
            return name, parameter
    raise MisuseError(f"no trainable parameter {which!r}: there are {len(named)}, from {[n for n, _ in named[:3]]} on")
