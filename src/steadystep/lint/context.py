"""What the rules look at, and how they say what they found."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from steadystep.lint.catalog import RULES
from steadystep.lint.edits import Edit
from steadystep.lint.events import Event, Kind, Loop
from steadystep.lint.hit import Hit
from steadystep.lint.names import owner_of
from steadystep.lint.networks import Network, networks_of
from steadystep.lint.roles import Roles
from steadystep.lint.script import Script
from steadystep.lint.walk import Walk


@final
@dataclass(frozen=True, slots=True)
class Cycle:
    """What is repeated around an optimizer's step: the events of one pass, in order."""

    step: Event
    loop: Loop | None
    events: tuple[Event, ...]
    root: tuple[Event, ...]
    """Everything the walk met, the cycle included."""

    def of(self, *kinds: Kind) -> list[Event]:
        """The events of these kinds."""
        return [event for event in self.events if event.kind in kinds]

    def before(self, event: Event) -> list[Event]:
        """What comes earlier in the same pass, the latest first."""
        return list(reversed(self.events[: self.events.index(event)]))

    def after(self, event: Event) -> list[Event]:
        """What comes later in the same pass."""
        return list(self.events[self.events.index(event) + 1 :])


@final
class Context:
    """One script, walked."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.roles = Roles(script)
        walk = Walk(script, self.roles)
        self.roots = [tuple(events) for events in walk.roots()]
        self.asked = walk.asked
        self.cycles = [cycle for root in self.roots for cycle in _cycles(root)]
        self.trains = bool(self.cycles) or any(e.kind == "guard" for root in self.roots for e in root)

    def events(self, *kinds: Kind) -> Iterator[Event]:
        """All events of these kinds."""
        for root in self.roots:
            for event in root:
                if event.kind in kinds:
                    yield event

    def stepped(self, step: Event) -> list[Network] | None:
        """Whose parameters a step changes; None when the file does not tell."""
        written = step.local if step.kind == "step" else step.subject
        if step.kind == "scaler-step" and isinstance(step.node, ast.Call) and step.node.args:
            written = owner_of(step.node.args[0])
        return self.held(written, step.owner if step.kind == "step" else step.subject, step)

    def held(self, written: str, outside: str, event: Event) -> list[Network] | None:
        """The networks of an optimizer, by its name at an event or by what the outermost caller calls it."""
        found = networks_of(self.script, self.roles, written, event.node)
        return found or networks_of(self.script, self.roles, outside, event.top or self.script.tree)

    def mentions(self, *names: str) -> bool:
        """Whether any of these is called in the file."""
        return any(name in self.script.calls for name in names)

    def edit(self) -> Edit:
        """A new fix."""
        return Edit(self.script)


def _cycles(root: tuple[Event, ...]) -> Iterator[Cycle]:
    for step in root:
        if step.kind not in ("step", "scaler-step"):
            continue
        for loop in reversed(step.loops):
            inside = tuple(e for e in root if loop in e.loops)
            if any(e.kind == "backward" for e in inside):
                yield Cycle(step, loop, inside, root)
                break
        else:
            inside = tuple(e for e in root if not step.loops or step.loops[-1] in e.loops)
            yield Cycle(step, step.loops[-1] if step.loops else None, inside, root)


RuleFunction = Callable[[Context], Iterator[Hit]]


def hit(code: str, node: ast.AST, message: str, *, diff: str = "", snippet: str = "", advice: bool = False) -> Hit:
    """A hit of a rule in the catalogue."""
    rule = RULES[code]
    return Hit(
        code=code,
        line=int(getattr(node, "lineno", 1)),
        column=int(getattr(node, "col_offset", 0)),
        message=message,
        severity="advice" if advice else rule.severity,
        why=rule.why,
        diff=diff,
        snippet=snippet,
    )
