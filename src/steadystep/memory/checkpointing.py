"""Activation checkpointing for repeated blocks (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

A checkpointed block keeps its inputs instead of everything its forward pass computed, and computes it again during
backward: about a third more compute, for memory that no longer grows with what happens inside a block. torch draws the
random numbers again from the same state, so dropout repeats. What torch leaves to us is in recompute.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Self, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadystep._utils.text import alike, plain_name
from steadystep.errors import ConfigError
from steadystep.memory.recompute import SavedBytes, SecondRun, count_saved

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
            near = alike(glob, names, count=4, cutoff=0.3) or list(names)[:4]
            raise ConfigError(f"match = {glob!r}: matches no module; similar names: {', '.join(near)}")
        found |= hits
    outermost = {name: found[name] for name in names if name in found and not _inside_any(name, found)}
    for name, module in outermost.items():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(
                f"match: {name!r} is a {type(module).__name__}, which has no forward of its own: use '{name}.*'"
            )
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
            yield plain_name(name), module


def _inside_any(name: str, blocks: Blocks) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _class_of(row: Blocks) -> type[nn.Module]:
    return type(next(iter(row.values())))


def _num_parameters(row: Blocks) -> int:
    return sum(p.numel() for module in row.values() for p in module.parameters())


def checkpoint_blocks(
    model: nn.Module, *, match: str | Sequence[str] | None = None, every: int = 1
) -> "CheckpointedBlocks":
    """Turn activation checkpointing on for the repeated blocks of a model.

    Gradients, random numbers, buffers and the keys of `state_dict` are unchanged.

    Args:
        model: the model.
        match: a glob over module names, or several. Default: the longest row of modules of one type.
        every: checkpoint every n-th block; 2 saves half as much for half the extra compute.

    >>> _ = torch.manual_seed(0)
    >>> block = lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> model = nn.Sequential(*(block() for _ in range(4)))
    >>> blocks = checkpoint_blocks(model)
    >>> blocks.names
    ('0', '1', '2', '3')
    >>> print(blocks.measure(lambda: model(torch.ones(16, 8)).sum()))
    2.0 KiB saved for backward with checkpointing, 18.0 KiB without: 89% less
    >>> blocks.remove()
    """
    if every < 1:
        raise ConfigError(f"every = {every!r}: must be at least 1 (1 is every block, 2 every second one)")
    blocks = list(find_blocks(model, match).items())[::every]
    return CheckpointedBlocks(model, dict(blocks))


@final
class CheckpointedBlocks:
    """Handle of `checkpoint_blocks`: call `remove()`, or use it as a context manager.

    Args:
        model: the model that contains the blocks.
        blocks: the checkpointed modules by name.
    """

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        self.names = tuple(blocks)
        self._model = model
        self._forwards = [_installed(block) for block in blocks.values()]

    def remove(self) -> None:
        """Turn activation checkpointing off again; a second call does nothing."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []

    def measure(self, run: Callable[[], object]) -> SavedBytes:
        """Measure the bytes that the forward pass of `run` saves for backward, with and without checkpointing.

        Weights and buffers do not count. Runs `run` twice and leaves buffers and random state unchanged. Without
        checkpointing it may need more memory than you have: measure with a small batch.
        """
        without, with_checkpoints = (self._count(run, active=active) for active in (False, True))
        return SavedBytes(without=without, with_checkpoints=with_checkpoints)

    def _count(self, run: Callable[[], object], *, active: bool) -> int:
        before = [forward.active for forward in self._forwards]
        try:
            for forward in self._forwards:
                forward.active = active
            return count_saved(self._model, run)
        finally:
            for forward, was in zip(self._forwards, before, strict=True):
                forward.active = was

    def __len__(self) -> int:
        return len(self.names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _installed(block: nn.Module) -> "_Forward":
    present = vars(block).get("forward")
    if isinstance(present, _Forward):  # checkpointing twice would compute twice
        present.active = True
        return present
    forward = _Forward(block, given=present)
    block.forward = forward
    return forward


@final
class _Forward:
    """The forward pass of one block, in the place of the method that its class defines.

    An object rather than a function, so that a copied or pickled model runs the copied block and not the original one.
    """

    def __init__(self, block: nn.Module, *, given: Callable[..., Any] | None) -> None:
        self.block = block
        self.given = given
        """What somebody else had put in this place, if anybody had."""
        self.active = True
        self.second_run = SecondRun(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        if torch.compiler.is_compiling() and self.second_run.harmless.get(self.block.training, False):
            return checkpoint(self.plain, *args, use_reentrant=False, **kwargs)
        return self.with_care(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Without checkpointing."""
        if self.given is not None:
            return self.given(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)

    # why: torch.compile takes no contexts of ours around a checkpoint, so there such a block is not part of a graph
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def with_care(self, *args: Any, **kwargs: Any) -> Any:
        """As `checkpoint`, and the second run neither sees nor leaves other buffers than the first."""
        contexts = self.second_run.contexts
        return checkpoint(self.plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def remove(self) -> None:
        """Out of the way; where somebody has wrapped us since, we stay and only pass through."""
        self.active = False
        if vars(self.block).get("forward") is self:
            del self.block.forward
            if self.given is not None:
                self.block.forward = self.given
