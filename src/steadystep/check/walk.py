"""A script in the order it runs: loops entered, branches noted, calls into the same file followed."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from steadystep.check.events import INTERESTING, Event, Loop, recognise
from steadystep.check.names import calls_in, last, name_of
from steadystep.check.roles import Roles, is_managed
from steadystep.check.script import Function, Script

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
        self._count = 0
        self._out: list[Event] = []
        self._entered: set[Function] = set()
        self._worth = _worth_following(script)

    def roots(self) -> list[list[Event]]:
        """The module first, then functions that nothing here calls, then what is left."""
        found = [self._walk(self._script.tree.body)]
        functions = [f for group in self._script.functions.values() for f in group if f in self._worth]
        functions.sort(key=lambda f: (self._is_called(f), f.lineno))
        for function in functions:
            if function not in self._entered:
                self._entered.add(function)
                found.append(self._walk(function.body, _Place(no_grad=_grad_off(function), stack=(function,))))
        return [events for events in found if events]

    def _is_called(self, function: Function) -> bool:
        sites = self._script.calls.get(function.name, ())
        return any(self._script.scope_of(site) is not function for site in sites)

    def _walk(self, body: Sequence[ast.stmt], place: _Place | None = None) -> list[Event]:
        self._out = []
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
        if _is_main_guard(stmt):
            self._block(stmt.body, place)
            return place
        self._count += 1
        key = self._count
        for arm, body in enumerate((stmt.body, stmt.orelse)):
            ends = _leaves_loop(body)
            there = replace(place, branch=(*place.branch, (key, arm)), last_round=place.last_round or ends)
            self._block(body, there)
        for arm, body in enumerate((stmt.body, stmt.orelse)):
            if _ends(body):  # what follows is reached through the other arm only
                return replace(place, branch=(*place.branch, (key, 1 - arm)))
        return place

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
        if seen is not None and seen.kind == "step" and call.args:  # the closure runs inside
            self._closure(call.args[0], place)
        if seen is not None:
            local = seen.owner
            event = Event(
                kind=seen.kind,
                node=call,
                stmt=stmt,
                owner=_outer(local, place.names),
                local=local,
                scaled=seen.scaled,
                managed=seen.managed,
                loss=seen.loss,
                subject=_outer(seen.subject, place.names),
            )
            self._add(event, place)
            return
        target = self._target(call)
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
        # why: dict displays and the like that are saved to disk do not step
        if (takes and last(name) not in ("print", "len", "id")) or (is_managed(name.rpartition(".")[0])):
            owner = _outer(takes[0], place.names) if takes else ""
            self._add(Event(kind="opaque", node=call, stmt=stmt, owner=owner, local=owner), place)

    def _closure(self, given: ast.expr, place: _Place) -> None:
        if isinstance(given, ast.Lambda):
            self._expression(given.body, self._script.stmt_of(given), place)
        for function in self._script.functions.get(name_of(given), ()):
            if function not in place.stack:
                self._entered.add(function)
                self._block(function.body, replace(place, stack=(*place.stack, function)))
                return

    def _target(self, call: ast.Call) -> Function | None:
        """The function in this file that a call runs, when there is just one it can be."""
        name = name_of(call.func)
        if not name:
            return None
        if "." not in name:
            functions = [f for f in self._script.functions.get(name, ()) if self._script.class_of(f) is None]
            if len(functions) == 1:
                return functions[0]
            return self._method(self._class_of_value(name, call), "__call__")
        owner, _, method = name.rpartition(".")
        if owner == "self":
            mine = self._script.class_of(call)
            return self._method(mine, method) or self._method(self._class_of_value(name, call), "__call__")
        return self._method(self._class_of_value(owner, call), method)

    def _class_of_value(self, name: str, at: ast.AST) -> ast.ClassDef | None:
        made = {
            last(name_of(v.func)) if isinstance(v, ast.Call) else "" for v in self._script.values(name, at)
        } & self._script.classes.keys()
        return self._script.classes[made.pop()] if len(made) == 1 else None

    def _method(self, owner: ast.ClassDef | None, name: str) -> Function | None:
        body = owner.body if owner else []
        return next((m for m in body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef) and m.name == name), None)

    def _enter(self, function: Function, call: ast.Call, place: _Place) -> None:
        if function in place.stack or len(place.stack) >= _DEEPEST or len(self._out) > _MOST:
            return
        self._entered.add(function)
        there = replace(
            place,
            names=_bind(function, call, place.names),
            stack=(*place.stack, function),
            no_grad=place.no_grad or _grad_off(function),
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


def is_no_grad(node: ast.AST) -> bool:
    """`torch.no_grad()`, `torch.inference_mode()`, `torch.set_grad_enabled(...)`."""
    name = last(name_of(node.func if isinstance(node, ast.Call) else node))
    return name in ("no_grad", "inference_mode", "set_grad_enabled")


def _grad_off(function: Function) -> bool:
    return any(is_no_grad(decorator) for decorator in function.decorator_list)


def _outer(name: str, names: Mapping[str, str]) -> str:
    head, dot, rest = name.partition(".")
    return names.get(head, head) + dot + rest


def _bind(function: Function, call: ast.Call, names: Mapping[str, str]) -> dict[str, str]:
    parameters = [p.arg for p in (*function.args.posonlyargs, *function.args.args)]
    bound = {}
    if parameters[:1] == ["self"]:
        owner = name_of(call.func).rpartition(".")[0]
        bound["self"] = _outer(owner, names) if owner else "self"
        parameters = parameters[1:]
    given: Iterator[tuple[str, ast.expr]] = zip(parameters, call.args, strict=False)
    for parameter, value in [*given, *((k.arg, k.value) for k in call.keywords if k.arg)]:
        if name_of(value):
            bound[parameter] = _outer(name_of(value), names)
    return bound


def _ends(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Continue | ast.Break | ast.Return | ast.Raise)


def _leaves_loop(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Break | ast.Return | ast.Raise)


def _is_main_guard(stmt: ast.If) -> bool:
    return isinstance(stmt.test, ast.Compare) and name_of(stmt.test.left) == "__name__"


def _worth_following(script: Script) -> set[Function]:
    """Functions in which, or below which, something happens that matters."""
    below: dict[Function, set[str]] = {}
    for group in script.functions.values():
        for function in group:
            names = set()
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    names.add(node.func.attr if isinstance(node.func, ast.Attribute) else name_of(node.func))
                elif isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Store):
                    names.add("zero_grad")
            below[function] = names
    found = {f for f, names in below.items() if names & INTERESTING}
    while True:
        worth = {f.name for f in found} | {"__call__"} & {f.name for f in found}
        more = {f for f, names in below.items() if f not in found and names & worth}
        if not more:
            return found
        found |= more
