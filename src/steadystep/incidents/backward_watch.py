"""Watches one backward pass through hooks on the autograd graph itself and keeps the first bad operation.

Not through module backward hooks: those wrap inputs and outputs in views, which breaks modules that work in place, and
they see the sum over all users of a tensor. A node of the graph has one gradient coming in and some going out; the
first that takes finite ones and gives others is the origin. Nodes are numbered in the order they were made, so the
module call that was under way then is known.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from steadystep.incidents.forward_watch import Call, ForwardWatch
from steadystep.incidents.tensors import badness, kind_of


@final
@dataclass(slots=True, kw_only=True)
class BadNode:
    """The operation at which a finite gradient went bad."""

    name: str
    number: int
    kind: str
    summed: bool
    """Bad already when it arrived, although nobody gave a bad one: finite gradients overflowed when added up."""


@final
@dataclass(slots=True)
class BackwardWatch:
    """Hooks on every node that can be reached from a loss."""

    forward: ForwardWatch
    found: BadNode | None = None
    _known: set[Any] = field(default_factory=set)
    _handles: list[RemovableHandle] = field(default_factory=list)

    def attach(self, tensors: Iterable[Tensor]) -> None:
        """Watch the graph behind these."""
        waiting: list[Any] = [t.grad_fn for t in tensors]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._known:
                continue
            self._known.add(node)
            self._handles.append(node.register_hook(self._hook(node)))
            waiting.extend(parent for parent, _ in node.next_functions)

    def remove(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._known.clear()

    def _hook(self, node: Any) -> Callable[[Any, Any], None]:
        name, number = node.name(), node._sequence_nr()

        def look(given: Sequence[Tensor | None], taken: Sequence[Tensor | None]) -> None:
            if self.found is not None:
                return
            for tensors, summed in ((taken, True), (given, False)):
                present = [t for t in tensors if t is not None]
                if any(badness(t) for t in present):
                    self.found = BadNode(name=name, number=number, kind=kind_of(present), summed=summed)
                    return

        return look

    def call_of(self, node: BadNode) -> Call | None:
        """The innermost module call under way when the node was made; None outside of all."""
        around = [c for c in self.forward.calls if c.first <= node.number < c.last]
        return max(around, key=lambda c: (c.depth, c.first)) if around else None
