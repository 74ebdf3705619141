"""Which modules of a model are its repeated blocks."""

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from steadystep.errors import ConfigError
from steadystep.names import plain

Blocks = dict[str, nn.Module]


def find_blocks(model: nn.Module, match: str | Sequence[str] | None = None) -> Blocks:
    """By name, in the order of the model: those the globs match, or without one those that repeat.

    A glob's `*` also crosses dots, and of modules that lie inside each other only the outermost counts.
    """
    if match is None:
        return _repeated(model)
    globs = [match] if isinstance(match, str) else list(match)
    names: Blocks = {}
    for name, module in _named(model):
        if name:
            names.setdefault(name, module)
    found: Blocks = {}
    for glob in globs:
        hits = {name: module for name, module in names.items() if fnmatchcase(name, glob)}
        if not hits:
            near = difflib.get_close_matches(glob, names, n=4, cutoff=0.3) or list(names)[:4]
            raise ConfigError(f"match = {glob!r}: no module has such a name; near ones: {', '.join(near)}")
        found |= hits
    outermost = {name: found[name] for name in names if name in found and not _inside_any(name, found)}
    for name, module in outermost.items():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(f"match: {name!r} is a {type(module).__name__}, which is never called: use '{name}.*'")
    return outermost


def _repeated(model: nn.Module) -> Blocks:
    """The longest row of alike modules in a ModuleList or Sequential, and the rows elsewhere of the same class.

    Rows inside a block are not looked at: the experts of a transformer layer repeat too, but the layer is the block.
    """
    rows: list[Blocks] = []
    for name, module in _named(model):
        if isinstance(module, nn.ModuleList | nn.Sequential) and not any(
            name in row or _inside_any(name, row) for row in rows
        ):
            rows += _rows(name, module)
    if not rows:
        raise ConfigError(
            "no repeated blocks found (modules of one class in a ModuleList or Sequential): name them with match="
        )
    longest = max(rows, key=lambda row: (len(row), _num_parameters(row)))
    kind = _class_of(longest)
    return {name: module for row in rows if _class_of(row) is kind for name, module in row.items()}


def _rows(name: str, container: nn.Module) -> Iterator[Blocks]:
    prefix = f"{name}." if name else ""
    by_class: dict[type[nn.Module], Blocks] = {}
    for key, child in container.named_children():
        by_class.setdefault(type(child), {})[prefix + key] = child
    for row in by_class.values():
        if len(row) > 1 and _is_block(next(iter(row.values()))) and _alike(row):
            yield row


def _is_block(module: nn.Module) -> bool:
    """Not a single layer of torch's, such as Linear: its input is saved either way, so there is nothing to gain."""
    single = type(module).__module__.startswith("torch.nn.") and not any(module.children())
    return not single and any(True for _ in module.parameters())


def _alike(row: Blocks) -> bool:
    """At least half of them have the same shapes; the stages of a pyramid, each wider than the last, do not."""
    shapes = Counter(tuple(p.shape for p in module.parameters()) for module in row.values())
    return 2 * max(shapes.values()) >= len(row)


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        # torch.compile's wrapper and its content are one
        if not name.endswith("_orig_mod") or isinstance(module, nn.ModuleList | nn.Sequential):
            yield plain(name), module


def _inside_any(name: str, blocks: Blocks) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _class_of(row: Blocks) -> type[nn.Module]:
    return type(next(iter(row.values())))


def _num_parameters(row: Blocks) -> int:
    return sum(p.numel() for module in row.values() for p in module.parameters())
