"""Learning rates that shrink towards the input: layer-wise decay (Howard & Ruder 2018; Clark et al. 2020, ELECTRA).

With L blocks, what comes after them keeps its rate, block i (from 0) gets rate ** (L - i) of it, and what comes before
them rate ** (L + 1): the numbering of BEiT and timm.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

from torch import nn

from steadystep.errors import ConfigError
from steadystep.groups.inventory import Item
from steadystep.groups.rule import is_number
from steadystep.names import plain


@final
@dataclass(frozen=True, slots=True)
class LayerDecay:
    """Each block learns `rate` times as fast as the one after it.

    >>> LayerDecay(0.9, blocks="encoder.layer.*").rate
    0.9

    Args:
        rate: 0.65 to 0.95 is usual.
        blocks: a glob over the paths of the blocks, bottom first, such as "encoder.layer.*". Without it, the one
            ModuleList or Sequential in the model whose members are all of one type.
    """

    rate: float
    blocks: str | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.rate) and 0 < self.rate <= 1):
            raise ConfigError(
                f"layer_decay = {self.rate!r}: must be greater than 0 and at most 1; 0.65 to 0.95 is usual"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Where a parameter stands."""

    label: str
    lr_mult: float


def layers(model: nn.Module, items: list[Item], decay: LayerDecay) -> list[Layer]:
    """The layer of each item."""
    blocks = _named(model, decay.blocks) if decay.blocks else _found(model)
    number = {id(block): n for n, (_, block) in reversed(list(enumerate(blocks, 1)))}
    inside = [_depth(item, number) for item in items]
    last = max(position for position, depth in enumerate(inside) if depth)
    end, reached, placed = len(blocks) + 1, 0, []
    for position, (item, depth) in enumerate(zip(items, inside, strict=True)):
        if depth:
            reached = max(reached, depth)
        elif any(home.is_embedding for home in item.homes):
            depth = 0
        else:
            depth = end if position > last else reached  # registered between two blocks: with the lower one
        label = "before the blocks" if depth == 0 else "after the blocks" if depth == end else blocks[depth - 1][0]
        placed.append(Layer(label=label, lr_mult=decay.rate ** (end - depth)))
    return placed


def _depth(item: Item, number: dict[int, int]) -> int:
    found = [number[id(owner)] for home in item.homes for owner in home.owners if id(owner) in number]
    return min(found, default=0)


def _found(model: nn.Module) -> list[tuple[str, nn.Module]]:
    stacks: dict[str, nn.Module] = {}
    covered: set[int] = set()
    for path, module in model.named_modules():
        if id(module) not in covered and _repeats(module):
            stacks[path] = module
            covered |= {id(inner) for inner in module.modules()}
    if len(stacks) != 1:
        what = f"{len(stacks)} stacks of repeated blocks ({', '.join(map(plain, stacks))})" if stacks else "no stack"
        example = next((f"{plain(path)}.*" for path in stacks), "layers.*")
        raise ConfigError(
            f"layer_decay: found {what} where one is needed: say which, LayerDecay(0.9, blocks={example!r}); "
            "blocks that match are taken in the order they are registered"
        )
    path, stack = next(iter(stacks.items()))
    return list(_members(path, stack))


def _repeats(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    members = list(module.children())
    return len(members) > 1 and len({type(member) for member in members}) == 1 and _holds_parameters(members[0])


def _named(model: nn.Module, glob: str) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    covered: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in covered or not fnmatchcase(plain(path), glob):
            continue
        covered |= {id(inner) for inner in module.modules()}
        if isinstance(module, nn.ModuleList):  # why: a list is never a block itself
            found += _members(path, module)
        elif _holds_parameters(module):
            found.append((plain(path), module))
    if not found:
        paths = [plain(path) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        hint = f"; there is {', '.join(f'{path}.*' for path in paths[:3])}" if paths else ""
        raise ConfigError(f"layer_decay: blocks = {glob!r} matches no module with parameters{hint}")
    return found


def _members(path: str, stack: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, member in stack.named_children():
        if _holds_parameters(member):
            yield plain(f"{path}.{name}" if path else name), member


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
