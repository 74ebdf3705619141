"""Which parameters are trained, and with which settings: read from model and optimizer, without touching a number."""

from torch import float16, nn
from torch.optim import Optimizer

from steadystep._utils.text import plain_name
from steadystep.records import Structure

_DECOUPLED = ("AdamW", "NAdamW", "Lion", "Adan", "Sophia", "Muon")
_PLAIN = ("SGD", "ASGD", "LBFGS")
_PLANNED = ("initial_lr", "max_lr")
_MODES = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def structure_of(model: nn.Module, optimizer: Optimizer) -> Structure:
    """As model and optimizer are now."""
    groups = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    held = {id(p): group for p, group in groups}
    named = [(plain_name(name), p) for name, p in model.named_parameters()]
    trained = [(name, p) for name, p in named if p.requires_grad and id(p) in held]
    decays = [_number(group.get("weight_decay", 0.0), 0.0) for group in optimizer.param_groups]
    each = getattr(optimizer, "each", (optimizer,))
    kinds = {type(one).__name__ for one in each}
    dropouts = {name: module.p for name, module in model.named_modules() if _is_dropout(module)}
    most = max(dropouts.values(), default=0.0)
    return Structure(
        trained=tuple(name for name, _ in trained),
        sizes=tuple(p.numel() for _, p in trained),
        frozen=sum(not p.requires_grad for _, p in named),
        unheld=tuple(name for name, p in named if p.requires_grad and id(p) not in held),
        last=named[-1][0] if named else "",
        announced=max((_number(g.get(key, 0.0), 0.0) for g in optimizer.param_groups for key in _PLANNED), default=0.0),
        rate_zero=tuple(name for name, p in trained if _number(held[id(p)].get("lr", 1.0), 1.0) == 0.0),
        weight_decay=max(decays, default=0.0),
        decoupled=bool(kinds & set(_DECOUPLED)) or any(group.get("decoupled_weight_decay") for _, group in groups),
        scale_free=not kinds & set(_PLAIN),
        dropout=most,
        dropouts=tuple(name for name, p in dropouts.items() if p == most > 0.0),
        half=sum(p.dtype is float16 for _, p in trained),
        modes=sum(_has_modes(module) for module in model.modules()),
    )


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


def _has_modes(module: nn.Module) -> bool:
    return isinstance(module, _MODES) and getattr(module, "p", 1.0) > 0.0


def _number(value: object, unknown: float) -> float:
    """A setting; `unknown` for one that is a tensor, which is not read here."""
    return float(value) if isinstance(value, int | float) else unknown
