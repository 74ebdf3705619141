"""Passes over data as they are met: which of them train, which of them only measure, and in which mode."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from steadystep.lint.context import Context
from steadystep.lint.events import Event, Loop
from steadystep.lint.names import name_of
from steadystep.lint.rules.passes import HELD_OUT, TRAIN

_TRAINS = ("backward", "step", "scaler-step", "opaque", "guard", "grad-call")
_MODES = ("train", "eval", "mode")
_SHORT = frozenset(["va", "te", "vl", "tst", "vld", "dl_va", "va_dl", "dl_te", "te_dl", "heldout", "held_out"])
_RANDOM = re.compile(r"mc_|dropout|uncertain|bayes|ensemble|update_bn|recalibrat|calibrate", re.I)


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """One pass that runs networks and does not train."""

    loop: Loop
    forwards: tuple[Event, ...]
    root: tuple[Event, ...]
    twin: bool
    """The same loop trains when it is met elsewhere, with another flag or in another phase."""
    held_out: bool

    @property
    def quiet(self) -> bool:
        """Gradients are off."""
        return all(e.no_grad for e in self.forwards)

    def mode(self) -> Event | None:
        """What was last called of train() and eval() on the network that runs here, before it does."""
        first = self.forwards[0]
        before = self.root[: self.root.index(first)]
        mine = [e for e in before if e.kind in _MODES and _is_about(e, first)]
        return mine[-1] if mine else None


def measured(context: Context) -> Iterator[Measured]:
    """All of them."""
    training = {loop.node for root in context.roots for loop in _trained(root)}
    for root in context.roots:
        trained = _trained(root)
        seen: set[Loop] = set()
        for event in root:
            loop = event.inner
            if event.kind != "forward" or loop is None or loop in seen or not _is_over_data(loop):
                continue
            seen.add(loop)
            if loop in trained or _is_random(context, loop):
                continue
            forwards = tuple(e for e in root if e.kind == "forward" and loop in e.loops)
            words = loop.over | loop.phases
            held_out = any(HELD_OUT.search(w) or w in _SHORT for w in words) and not any(TRAIN.search(w) for w in words)
            yield Measured(loop, forwards, root, loop.node in training, held_out)


def training_loops(root: tuple[Event, ...]) -> list[Loop]:
    """The loops that go over the data they train on."""
    return [loop for loop in _trained(root) if _is_over_data(loop)]


def _trained(root: tuple[Event, ...]) -> list[Loop]:
    return list(
        dict.fromkeys(loop for e in root if e.kind in _TRAINS and (e.kind != "opaque" or e.owner) for loop in e.loops)
    )


def _is_over_data(loop: Loop) -> bool:
    """Not a count, not a wait: something is taken from somewhere."""
    if isinstance(loop.node, ast.While):
        return False
    over = loop.node.iter if isinstance(loop.node, ast.For | ast.AsyncFor) else loop.node.generators[0].iter
    return not (isinstance(over, ast.Call) and name_of(over.func) in ("range", "reversed", "trange"))


def _is_about(mode: Event, forward: Event) -> bool:
    """The network itself, or one that it is a part of."""
    return f"{forward.owner}.".startswith((f"{mode.owner}.", f"{mode.owner}["))


def _is_random(context: Context, loop: Loop) -> bool:
    scope = context.script.scope_of(loop.node)
    return scope is not None and bool(_RANDOM.search(scope.name))
