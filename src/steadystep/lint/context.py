"""What the rules look at, how they say what they found, and a fix as a unified diff that is never applied here."""

import ast
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from steadystep.lint.catalog import RULES
from steadystep.lint.events import EnteredLoop, Event, EventKind
from steadystep.lint.names import last, name_of, owner_of
from steadystep.lint.networks import Network, networks_of
from steadystep.lint.report import Hit
from steadystep.lint.roles import Roles
from steadystep.lint.script import Script
from steadystep.lint.walk import Walk


@final
class Edit:
    """Changes to one script, in line numbers of the original."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._gone: set[int] = set()
        self._before: dict[int, list[str]] = {}
        self._instead: dict[int, str] = {}

    def remove(self, stmt: ast.stmt) -> "Edit":
        """Take a statement out."""
        self._gone.update(range(stmt.lineno, (stmt.end_lineno or stmt.lineno) + 1))
        return self

    def put_before(self, stmt: ast.stmt, *lines: str) -> "Edit":
        """New lines in front of a statement, indented like it."""
        return self._put(stmt.lineno, stmt, lines)

    def put_after(self, stmt: ast.stmt, *lines: str) -> "Edit":
        """New lines behind a statement, indented like it."""
        return self._put((stmt.end_lineno or stmt.lineno) + 1, stmt, lines)

    def replace(self, node: ast.AST, text: str) -> "Edit":
        """Another expression in its place; both on one line."""
        first, end = int(getattr(node, "lineno", 0)), int(getattr(node, "end_lineno", 0) or 0)
        if first == end and 0 < first <= len(self._script.lines):
            line = self._instead.get(first, self._script.lines[first - 1])
            raw = line.encode()
            begin, stop = int(getattr(node, "col_offset", 0)), int(getattr(node, "end_col_offset", 0) or 0)
            self._instead[first] = (raw[:begin] + text.encode() + raw[stop:]).decode(errors="replace")
        return self

    def _put(self, line: int, like: ast.stmt, lines: Sequence[str]) -> "Edit":
        original = self._script.lines[like.lineno - 1]
        indent = original[: len(original) - len(original.lstrip())]
        self._before.setdefault(line, []).extend(indent + text for text in lines)
        return self

    def diff(self) -> str:
        """What changes, with one line of context; empty when nothing does."""
        touched = [*self._before, *self._gone, *self._instead]
        if not touched:
            return ""
        # why not the whole file: difflib's time grows with what it is shown, and every hit has its diff
        first = max(1, min(touched) - 2)
        if max(touched) > self._script.own + 1:
            return ""  # another file would have to be changed
        old, new = self._script.lines[: self._script.own][first - 1 : max(touched) + 2], list[str]()
        for number, line in enumerate(old, first):
            new += self._before.get(number, [])
            if number not in self._gone:
                new.append(self._instead.get(number, line))
        new += self._before.get(self._script.own + 1, [])
        name = self._script.path
        lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="", n=1)
        return "\n".join(_moved(line, first - 1) if line.startswith("@@ ") else line for line in lines)


def _moved(header: str, by: int) -> str:
    """`@@ -1,3 +1,4 @@` of a part of the file, with the numbers of the file."""
    return re.sub(r"([-+])(\d+)", lambda found: f"{found[1]}{int(found[2]) + by}", header)


def source_of(stmt: ast.stmt, script: Script) -> list[str]:
    """The lines of a statement without their common indent."""
    lines = script.lines[stmt.lineno - 1 : stmt.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    return [line[indent:] if not line[:indent].strip() else line.lstrip() for line in lines]


def can_move(stmt: ast.stmt, to: ast.stmt, script: Script) -> bool:
    """Whether a statement can change its place next to another one: same block of the same function."""
    if ";" in script.lines[stmt.lineno - 1] or ";" in script.lines[to.lineno - 1]:
        return False
    return script.parents.get(stmt) is script.parents.get(to) and isinstance(stmt, ast.Expr | ast.Assign)


@final
@dataclass(frozen=True, slots=True)
class Cycle:
    """What is repeated around an optimizer's step: the events of one pass, in order."""

    step: Event
    loop: EnteredLoop | None
    events: tuple[Event, ...]
    root: tuple[Event, ...]
    """Everything the walk met, the cycle included."""

    def of(self, *kinds: EventKind) -> list[Event]:
        """The events of these kinds."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def leaves_the_file(self) -> bool:
        """Something that the file does not show has a part in it."""
        return bool(self.of("opaque", "guard"))

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
        self._held: dict[tuple[object, ...], list[Network] | None] = {}
        self._of_kinds: dict[tuple[EventKind, ...], list[Event]] = {}
        self.asked = walk.asked
        self.cycles = [cycle for root in self.roots for cycle in _cycles(root)]
        self.trains = bool(self.cycles) or any(e.kind == "guard" for root in self.roots for e in root)

    def events(self, *kinds: EventKind) -> Iterator[Event]:
        """All events of these kinds."""
        if kinds not in self._of_kinds:  # every rule asks, for every loop, loss and network
            self._of_kinds[kinds] = [event for root in self.roots for event in root if event.kind in kinds]
        yield from self._of_kinds[kinds]

    def stepped(self, step: Event) -> list[Network] | None:
        """Whose parameters a step changes; None when the file does not tell."""
        written = step.local if step.kind == "step" else step.subject
        if step.kind == "scaler-step" and isinstance(step.node, ast.Call) and step.node.args:
            written = owner_of(step.node.args[0])
        return self.held(written, step.owner if step.kind == "step" else step.subject, step)

    def held(self, written: str, outside: str, event: Event) -> list[Network] | None:
        """The networks of an optimizer, by its name at an event or by what the outermost caller calls it."""
        key = (written, outside, event.node, event.top)
        if key not in self._held:
            found = networks_of(self.script, self.roles, written, event.node)
            self._held[key] = found or networks_of(self.script, self.roles, outside, event.top or self.script.tree)
        return self._held[key]

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


def only_goes_back(context: Context, backward: Event, *, divides: bool = True) -> bool:
    """`accelerator.backward(loss)`, `fabric.backward(loss)`, `self.manual_backward(loss)`; an engine may do more.

    accelerate divides by the number of micro-batches; `divides=False` leaves it out.
    """
    script, leaf = context.script, last(backward.local).lower()
    if isinstance(backward.node, ast.Call) and last(name_of(backward.node.func)) == "manual_backward":
        return True
    made = [v for v in script.values(backward.local, backward.node) if isinstance(v, ast.Call)]
    known = {last(script.full(v.func)) for v in made}
    if "Fabric" in known or "fabric" in leaf:
        return True
    return divides and ("Accelerator" in known or "accelerator" in leaf)


RuleFunction = Callable[[Context], Iterator[Hit]]


def hit(code: str, node: ast.AST, message: str, *, diff: str = "", snippet: str = "", advice: bool = False) -> Hit:
    """A hit of a rule in the catalogue."""
    rule = RULES[code]
    compound = hasattr(node, "body") and isinstance(node, ast.stmt)
    return Hit(
        code=code,
        line=int(getattr(node, "lineno", 1)),
        column=int(getattr(node, "col_offset", 0)),
        message=message,
        severity="advice" if advice else rule.severity,
        why=rule.why,
        diff=diff,
        snippet=snippet,
        end_line=0 if compound else int(getattr(node, "end_lineno", 0) or 0),
        end_column=0 if compound else int(getattr(node, "end_col_offset", 0) or 0),
    )
