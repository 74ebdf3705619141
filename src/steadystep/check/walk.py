"""A script in the order it runs: loops entered, branches noted, calls into the same file followed."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from steadystep.check.control import (
    HARMLESS,
    bind,
    ends,
    grad_off,
    is_main_guard,
    is_no_grad,
    leaves_loop,
    outer,
    worth_following,
)
from steadystep.check.events import Event, Loop, recognise
from steadystep.check.names import calls_in, last, name_of
from steadystep.check.roles import Roles, is_managed
from steadystep.check.script import Function, Script
from steadystep.check.targets import target_of

_DEEPEST = 4  # calls followed into the file
_MOST = 4000  # events of one walk: beyond it a file is not a training script but a library


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    branch: tuple[tuple[int, int], ...] = ()
    loops: tuple[Loop, ...] = ()
    no_grad: bool = False
    last_round: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    """What the outermost caller calls our parameters."""
    stack: tuple[Function, ...] = ()


@final
class Walk:
    """All roots of a script, each as a list of events."""

    def __init__(self, script: Script, roles: Roles) -> None:
        self._script, self._roles = script, roles
        self.asked: dict[int, ast.expr] = {}
        """What the `if` of each number in an event's branch asks; arm 0 is yes."""
        self._count = 0
        self._out: list[Event] = []
        self._questions: dict[tuple[str, tuple[Loop, ...]], int] = {}
        self._entered: set[Function] = set()
        self._worth = worth_following(script)

    def roots(self) -> list[list[Event]]:
        """The module first, then functions that nothing here calls, then what is left."""
        found = [self._walk(self._script.tree.body)]
        functions = [f for group in self._script.functions.values() for f in group if f in self._worth]
        functions.sort(key=lambda f: (self._is_called(f), f.lineno))
        for function in functions:
            if function not in self._entered:
                self._entered.add(function)
                found.append(self._walk(function.body, _Place(no_grad=grad_off(function), stack=(function,))))
        return [events for events in found if events]

    def _is_called(self, function: Function) -> bool:
        sites = self._script.calls.get(function.name, ())
        return any(self._script.scope_of(site) is not function for site in sites)

    def _walk(self, body: Sequence[ast.stmt], place: _Place | None = None) -> list[Event]:
        self._out, self._questions = [], {}
        self._block(body, place or _Place())
        return self._out

    def _block(self, body: Sequence[ast.stmt], place: _Place) -> None:
        for stmt in body:
            place = self._statement(stmt, place)

    def _statement(self, stmt: ast.stmt, place: _Place) -> _Place:
        """Events of one statement; the place that the next one is at."""
        match stmt:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if isinstance(stmt, ast.ClassDef):
                    return place
            case ast.If():
                return self._if(stmt, place)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._expression(stmt.test if isinstance(stmt, ast.While) else stmt.iter, stmt, place)
                self._count += 1
                loop = Loop(node=stmt, number=self._count)
                self._block(stmt.body, replace(place, loops=(*place.loops, loop), last_round=False))
                self._block(stmt.orelse, place)
            case ast.With() | ast.AsyncWith():
                for item in stmt.items:
                    self._expression(item.context_expr, stmt, place)
                off = any(is_no_grad(item.context_expr) for item in stmt.items)
                self._block(stmt.body, replace(place, no_grad=place.no_grad or off))
            case ast.Try() | ast.TryStar():
                self._block(stmt.body, place)
                self._count += 1
                for handler in stmt.handlers:
                    self._block(handler.body, replace(place, branch=(*place.branch, (self._count, 1))))
                self._block(stmt.orelse, place)
                self._block(stmt.finalbody, place)
            case ast.Match():
                self._count += 1
                for arm, case in enumerate(stmt.cases):
                    self._block(case.body, replace(place, branch=(*place.branch, (self._count, arm))))
            case _:
                self._expression(stmt, stmt, place)
                self._grad_none(stmt, place)
        return place

    def _if(self, stmt: ast.If, place: _Place) -> _Place:
        self._expression(stmt.test, stmt, place)
        if is_main_guard(stmt):
            self._block(stmt.body, place)
            return place
        key, flipped = self._question(stmt.test, place)
        self.asked.setdefault(key, stmt.test.operand if flipped and isinstance(stmt.test, ast.UnaryOp) else stmt.test)
        arms = (stmt.orelse, stmt.body) if flipped else (stmt.body, stmt.orelse)
        for arm, body in sorted(enumerate(arms), key=lambda pair: pair[1] is not stmt.body):
            left = place.last_round or leaves_loop(body)
            there = replace(place, branch=(*place.branch, (key, arm)), last_round=left)
            self._block(body, there)
        for arm, body in enumerate(arms):
            if ends(body):  # what follows is reached through the other arm only
                return replace(place, branch=(*place.branch, (key, 1 - arm)))
        return place

    def _question(self, test: ast.expr, place: _Place) -> tuple[int, bool]:
        """A number for what an `if` asks, and whether it asks the opposite: `if fp16` twice is one question."""
        flipped = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        asked = test.operand if isinstance(test, ast.UnaryOp) and flipped else test
        self._count += 1
        if not name_of(asked):
            return self._count, False
        # why only plain names: a comparison or a call may have another answer the second time
        return self._questions.setdefault((outer(name_of(asked), place.names), place.loops), self._count), flipped

    def _grad_none(self, stmt: ast.stmt, place: _Place) -> None:
        if isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Constant) and stmt.value.value is None:
            for target in stmt.targets:
                if isinstance(target, ast.Attribute) and target.attr == "grad":
                    self._add(Event(kind="zero", node=stmt, stmt=stmt, owner="", local=""), place)

    def _expression(self, node: ast.AST, stmt: ast.stmt, place: _Place) -> None:
        for call in calls_in(node):
            self._call(call, stmt, place)

    def _call(self, call: ast.Call, stmt: ast.stmt, place: _Place) -> None:
        seen = recognise(call, self._script, self._roles)
        if (
            seen is not None
            and seen.kind == "backward"
            and seen.managed
            and target_of(call, self._script) in self._worth
        ):
            seen = None  # a method of this file that happens to be called so
        if seen is not None and seen.kind == "step" and call.args:  # the closure runs inside
            self._closure(call.args[0], place)
        if seen is not None:
            local = seen.owner
            event = Event(
                kind=seen.kind,
                node=call,
                stmt=stmt,
                owner=outer(local, place.names),
                local=local,
                scaled=seen.scaled,
                managed=seen.managed,
                loss=seen.loss,
                subject=outer(seen.subject, place.names),
            )
            self._add(event, place)
            return
        target = target_of(call, self._script)
        if target is not None and target in self._worth:
            self._enter(target, call, place)
        elif target is None:
            self._opaque(call, stmt, place)

    def _opaque(self, call: ast.Call, stmt: ast.stmt, place: _Place) -> None:
        """A call out of the file that takes an optimizer with it may do anything to it; so may an engine's step."""
        if self._roles.made_by(call) == "scheduler":
            return
        name = name_of(call.func)
        given = [*call.args, *(k.value for k in call.keywords)]
        takes = [name_of(a) for a in given if self._roles.of(name_of(a), call) == "optimizer"]
        if last(name) in HARMLESS:
            return
        if takes or is_managed(name.rpartition(".")[0]):
            owner = outer(takes[0], place.names) if takes else ""
            self._add(Event(kind="opaque", node=call, stmt=stmt, owner=owner, local=owner), place)

    def _closure(self, given: ast.expr, place: _Place) -> None:
        if isinstance(given, ast.Lambda):
            self._expression(given.body, self._script.stmt_of(given), place)
        for function in self._script.functions.get(name_of(given), ()):
            if function not in place.stack:
                self._entered.add(function)
                self._block(function.body, replace(place, stack=(*place.stack, function)))
                return

    def _enter(self, function: Function, call: ast.Call, place: _Place) -> None:
        if function in place.stack or len(place.stack) >= _DEEPEST or len(self._out) > _MOST:
            return
        self._entered.add(function)
        there = replace(
            place,
            names=bind(function, call, place.names),
            stack=(*place.stack, function),
            no_grad=place.no_grad or grad_off(function),
        )
        self._block(function.body, there)

    def _add(self, event: Event, place: _Place) -> None:
        self._out.append(
            replace(
                event,
                branch=place.branch,
                loops=place.loops,
                no_grad=place.no_grad,
                last_round=place.last_round,
                depth=len(place.stack),
            )
        )
