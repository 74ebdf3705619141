"""Watches one forward pass through hooks and keeps who may have made the first bad number.

Values are looked at where they enter and where they leave a module. A module that takes good values and gives bad ones
is a suspect. Bad values that appear at the entry of a module, when none had been seen before, come from an operation of
the module that calls it. A module that gives good values although something inside it was bad has dealt with it, so
what is inside is cleared (it is asked again only if nobody else is left: a loss may be handed on in an attribute).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, autograd, nn
from torch.utils.hooks import RemovableHandle

from steadystep._utils.tensors import graph_nodes
from steadystep._utils.text import plain_name
from steadystep._utils.tree import tensors_in
from steadystep.incidents.origin import Badness, badness, kind_of


@final
@dataclass(slots=True, kw_only=True)
class Suspect:
    """Somebody who may have made the first bad number."""

    module: nn.Module | None
    """None: the code around the model."""
    name: str
    what: str
    tensor: str = ""
    from_data: bool = False
    """It was bad when it came in, and nothing had been computed from the weights."""
    masking: bool = False
    """-inf only: perhaps meant."""
    is_cleared: bool = False
    receiver: str = ""
    """The module whose input it was, where it came from outside."""


@final
@dataclass(slots=True, kw_only=True)
class TracedCall:
    """One run of one module; the numbers say which autograd nodes were made meanwhile."""

    module: nn.Module
    name: str
    first: int
    last: int = -1
    taken: Badness = Badness.FINITE
    masked: str = ""
    """An input without history that holds -inf: a mask, or data that is not what it should be."""
    suspects_before: int = 0
    depth: int = 0


@final
@dataclass(slots=True)
class ForwardWatch:
    """Hooks on every module of a model, for as long as `watching` lasts."""

    model: nn.Module
    suspects: list[Suspect] = field(default_factory=list)
    calls: list[TracedCall] = field(default_factory=list)
    judging: bool = True
    """False while backward runs: a checkpointed block is computed once more then."""
    recomputed: Callable[[Sequence[Tensor]], None] = field(default=lambda _: None)
    """Told of what modules return during backward: graphs of their own hang from it."""
    _open: list[TracedCall] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Puts the hooks in place and takes every one away again."""
        handles: list[RemovableHandle] = []
        try:
            for path, module in self.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule) and path:  # cannot be hooked inside
                    continue
                self._hook(plain_name(path), module, handles)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, module: nn.Module, handles: list[RemovableHandle]) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not _transformed():
                self._enter(name, module, [*tensors_in(args, "input"), *tensors_in(kwargs, "input")])

        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not _transformed():
                self._leave(module, output)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))

    def _enter(self, name: str, module: nn.Module, given: Sequence[tuple[str, Tensor]]) -> None:
        call = TracedCall(
            module=module,
            name=name,
            first=autograd._get_sequence_nr(),  # type: ignore[attr-defined]
            suspects_before=len(self.suspects),
            depth=len(self._open),
        )
        if self.judging:
            found = [(key, tensor, _verdict(tensor)) for key, tensor in given]
            call.taken = max((verdict for *_, verdict in found), default=Badness.FINITE)
            call.masked = next((key for key, t in given if not t.requires_grad and badness(t) is Badness.MASK), "")
            if call.taken is Badness.BAD:
                key, tensor = next((k, t) for k, t, verdict in found if verdict is Badness.BAD)
                self._bad_input(name or type(module).__name__, key, tensor)
        self._open.append(call)
        self.calls.append(call)

    def _bad_input(self, receiver: str, key: str, tensor: Tensor) -> None:
        """Somebody before this call made it; the caller did, unless a suspect is known."""
        caller = self._open[-1] if self._open else None
        if caller is not None and caller.taken is Badness.BAD:
            return
        if any(not s.is_cleared and not s.masking for s in self.suspects):
            return
        kind = kind_of([tensor])
        if caller is None:
            from_data = tensor.grad_fn is None
            what = (
                f"{kind} entered through {receiver}'s {key}"
                if from_data
                else f"{kind} was produced before {receiver} ran"
            )
            self._suspect(
                Suspect(module=None, name="", what=what, tensor=key, from_data=from_data, receiver=receiver), since=0
            )
            return
        what = f"one of its own operations, before {receiver}, produced {kind}"
        suspect = Suspect(module=caller.module, name=caller.name, what=what)
        self._suspect(suspect, since=caller.suspects_before)

    def _leave(self, module: nn.Module, output: Any) -> None:
        while self._open and self._open[-1].module is not module:
            self._open.pop()  # an exception went through it
        if not self._open:
            return
        call = self._open.pop()
        call.last = autograd._get_sequence_nr()  # type: ignore[attr-defined]
        tensors = [tensor for _, tensor in tensors_in(output)]
        if not self.judging:
            self.recomputed(tensors)
            return
        given = max((_verdict(tensor) for tensor in tensors), default=Badness.FINITE)
        inside = [s for s in self.suspects[call.suspects_before :] if not s.is_cleared]
        if given is Badness.FINITE and tensors:
            for suspect in inside:
                suspect.is_cleared = True
        elif given > call.taken and not any(given is Badness.MASK or not s.masking for s in inside):
            own = (
                "one of its own operations, outside its submodules, produced"
                if any(module.children())
                else "it produced"
            )
            what = f"{own} {kind_of(tensors)} from finite inputs"
            suspect = Suspect(module=module, name=call.name, what=what, masking=given is Badness.MASK)
            if call.masked and module._parameters and not module._modules:
                # why: a layer that multiplies by weights and has no parts takes data, never a mask
                what = f"-inf entered through {call.name or type(module).__name__}'s {call.masked}"
                suspect = Suspect(module=None, name="", what=what, tensor=call.masked, from_data=True)
            self._suspect(suspect, since=0 if call.taken is Badness.MASK else call.suspects_before)

    def _suspect(self, suspect: Suspect, *, since: int) -> None:
        """-inf that led to something worse was not meant: whoever made it is the one."""
        for earlier in reversed(self.suspects[since:]):
            if earlier.masking and not earlier.is_cleared and not suspect.masking:
                earlier.masking = False
                return
        self.suspects.append(suspect)

    def first(self) -> Suspect | None:
        """Who it was, as far as modules can tell."""
        # why: who made a bad number from good ones did so whatever the data; a model may allow for gaps in it
        at_large = sorted((s for s in self.suspects if not s.is_cleared), key=lambda s: s.from_data)
        for group in ([s for s in at_large if not s.masking], at_large, [s for s in self.suspects if not s.masking]):
            if group:
                return group[0]
        return None


def _verdict(tensor: Tensor) -> Badness:
    # why: a mask is a constant; with a history, -inf is a value that overflowed or the logarithm of nothing
    found = badness(tensor)
    return Badness.FINITE if found is Badness.MASK and not tensor.requires_grad else found


def _transformed() -> bool:
    """Inside a compiled function or a torch.func transform a number cannot be looked at."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


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
        for node in graph_nodes(tensors, self._known):
            self._handles.append(node.register_hook(self._hook(node)))

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

    def call_of(self, node: BadNode) -> TracedCall | None:
        """The innermost module call under way when the node was made; None outside of all."""
        around = [c for c in self.forward.calls if c.first <= node.number < c.last]
        return max(around, key=lambda c: (c.depth, c.first)) if around else None
