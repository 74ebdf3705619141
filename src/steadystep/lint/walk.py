"""A script in the order it runs: loops entered, branches noted, calls into the same file followed."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from steadystep.lint import placing
from steadystep.lint.control import (
    callers_first,
    ends,
    inner_body,
    leaves_loop,
    managed_by,
    switches_off,
    worth_following,
)
from steadystep.lint.events import Comprehension, Event, LoopNode, recognise
from steadystep.lint.names import name_of
from steadystep.lint.place import Place, Questions
from steadystep.lint.roles import Roles
from steadystep.lint.script import Function, Script
from steadystep.lint.targets import target_of

_DEEPEST = 5  # calls followed into the file
_MOST = 4000  # events of one walk: beyond it a file is not a training script but a library


@final
class Walk:
    """All roots of a script, each as a list of events."""

    def __init__(self, script: Script, roles: Roles) -> None:
        self._script, self._roles = script, roles
        self.asked: dict[int, ast.expr] = {}
        """What the `if` of each number in an event's branch asks; arm 0 is yes."""
        self._count = 0
        self._out: list[Event] = []
        self._questions = Questions(script)
        self._entered: set[Function] = set()
        self._worth = worth_following(script)
        self._bodies: list[tuple[Sequence[ast.stmt], Place]] = []
        self._top: ast.stmt | None = None

    def roots(self) -> list[list[Event]]:
        """The module first, then functions that nothing here calls, then what is left."""
        found = [self._walk(self._script.tree.body, Place())]
        for function in callers_first(self._worth, self._script):
            if function not in self._entered and not self._script.is_foreign(function):
                self._entered.add(function)
                off = switches_off(function, self._script)
                found.append(self._walk(function.body, Place(no_grad=off, stack=(function,))))
        return [events for events in found if events]

    def _walk(self, body: Sequence[ast.stmt], place: Place) -> list[Event]:
        self._out, self._questions = [], Questions(self._script)
        self._top = place.stack[0].body[0] if place.stack else None
        self._block(body, place)
        return self._out

    def _block(self, body: Sequence[ast.stmt], place: Place) -> Place:
        for stmt in body:
            if place.over:
                break
            place = self._statement(stmt, place)
        return place

    def _statement(self, stmt: ast.stmt, place: Place) -> Place:
        """Events of one statement; the place that the next one is at."""
        match stmt:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return place
            case ast.If():
                return self._if(stmt, place)
            case ast.For() | ast.AsyncFor():
                self._expression(stmt.iter, stmt, place)
                for inside in self._inside(stmt, stmt.target, stmt.iter, stmt.body, place):
                    self._block(stmt.body, inside)
                return self._block(stmt.orelse, place)
            case ast.While():
                self._expression(stmt.test, stmt, place)
                self._count += 1
                self._block(stmt.body, placing.repeated(stmt, None, place, self._count, self._script))
                return self._block(stmt.orelse, place)
            case ast.With() | ast.AsyncWith():
                return self._with(stmt, list(stmt.items), place)
            case ast.Try() | ast.TryStar():
                after = self._block(stmt.body, place)
                self._count += 1
                for handler in stmt.handlers:
                    self._block(handler.body, replace(place, branch=(*place.branch, (self._count, 1))))
                self._block(stmt.orelse, place)
                self._block(stmt.finalbody, place)
                return after if not stmt.handlers else place
            case ast.Match():
                self._count += 1
                for arm, case in enumerate(stmt.cases):
                    self._block(case.body, replace(place, branch=(*place.branch, (self._count, arm))))
            case _:
                self._expression(stmt, stmt, place)
                for event in placing.cleared_by_hand(stmt, self._script):
                    self._add(event, place)
                if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Yield) and self._bodies:
                    self._managed(place)
        return place

    def _with(self, stmt: ast.With | ast.AsyncWith, items: list[ast.withitem], place: Place) -> Place:
        """The body, inside of what a context manager of this file does around it."""
        before = place
        for i, item in enumerate(items):
            call = item.context_expr
            around = managed_by(call, self._script)
            if around and isinstance(call, ast.Call) and len(place.stack) < _DEEPEST:
                self._bodies.append((inner_body(stmt, items[i + 1 :]), place))
                waiting = len(self._bodies)
                for function in around:
                    self._entered.add(function)
                    self._block(function.body, place.entering(function, call, self._script))
                    if len(self._bodies) == waiting:  # after __enter__, or a manager that does not seem to yield
                        self._managed(place)
                return before
            self._expression(call, stmt, place)
            place = placing.inside_of(call, place, self._script)
        inside = self._block(stmt.body, place)
        return replace(inside, no_grad=before.no_grad)

    def _managed(self, place: Place) -> None:
        """The body of a `with`, at the place where its manager yields."""
        body, outside = self._bodies.pop()
        self._block(body, replace(outside, no_grad=outside.no_grad or place.no_grad))

    def _inside(
        self, node: LoopNode, target: ast.expr, over: ast.expr, body: Sequence[ast.AST], place: Place
    ) -> list[Place]:
        """One place for each pass that is written out; else one inside of a loop."""
        self._count += 1
        number = self._count if len(self._out) < _MOST else -self._count
        return placing.passes_of(node, target, over, list(body), place, self._script, number)

    def _if(self, stmt: ast.If, place: Place) -> Place:
        self._expression(stmt.test, stmt, place)
        taken = placing.sure_arm(stmt, place, self._script)
        if taken is not None:
            there = self._block(taken, replace(place, last_round=place.last_round or leaves_loop(taken)))
            return replace(place, over=there.over or ends(taken))
        self._count += 1
        key, flipped, asked = self._questions.number(stmt.test, place, self._count)
        self.asked.setdefault(key, asked)
        arms = (stmt.orelse, stmt.body) if flipped else (stmt.body, stmt.orelse)
        for arm, body in sorted(enumerate(arms), key=lambda pair: pair[1] is not stmt.body):
            left = place.last_round or leaves_loop(body)
            self._block(body, replace(place, branch=(*place.branch, (key, arm)), last_round=left))
        for arm, body in enumerate(arms):
            if ends(body):  # what follows is reached through the other arm only
                return replace(place, branch=(*place.branch, (key, 1 - arm)))
        return place

    def _expression(self, node: ast.AST, stmt: ast.stmt, place: Place) -> None:
        """Calls in the order they are made; those inside a lambda or a nested function are not made here."""
        if isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        if isinstance(node, Comprehension):
            first = node.generators[0]
            self._expression(first.iter, stmt, place)
            parts = placing.parts_of(node)
            for inside in self._inside(node, first.target, first.iter, parts, place):
                for part in parts:
                    self._expression(part, stmt, inside)
            return
        for child in ast.iter_child_nodes(node):
            self._expression(child, stmt, place)
        if isinstance(node, ast.Call):
            self._call(node, stmt, place)

    def _call(self, call: ast.Call, stmt: ast.stmt, place: Place) -> None:
        seen = recognise(call, self._script, self._roles)
        target = target_of(call, self._script)
        if seen is not None and seen.kind == "backward" and seen.managed and target in self._worth:
            seen = None  # a method of this file that happens to be called so
        if seen is not None and seen.kind == "step" and call.args:  # the closure runs inside
            self._closure(call.args[0], place)
        if seen is not None:
            self._add(placing.event_of(seen, call, stmt, place, self._script), place)
        elif target is not None and target in self._worth:
            self._enter(target, call, place)
        elif target is None and (taken := placing.opaque(call, stmt, place, self._script, self._roles)) is not None:
            self._add(taken, place)

    def _closure(self, given: ast.expr, place: Place) -> None:
        if isinstance(given, ast.Lambda):
            self._expression(given.body, self._script.stmt_of(given), place)
        for function in self._script.functions.get(name_of(given), ()):
            if function not in place.stack:
                self._entered.add(function)
                self._block(function.body, replace(place, stack=(*place.stack, function)))
                return

    def _enter(self, function: Function, call: ast.Call, place: Place) -> None:
        if function in place.stack or len(place.stack) >= _DEEPEST or len(self._out) > _MOST:
            return
        self._entered.add(function)
        self._block(function.body, place.entering(function, call, self._script))

    def _add(self, event: Event, place: Place) -> None:
        self._out.append(placing.placed(event, place, self._top))
