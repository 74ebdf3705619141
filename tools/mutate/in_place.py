"""Judges mutants in forks of one process that holds the collected tests, with the broken code put in place.

Importing the package and collecting tests costs more than most mutants' tests do; a fork costs milliseconds. The code
of a function, its defaults, or a constant of a module are exchanged in the fork. What cannot be (a field of a class, a
decorated function that hides what it wraps) is left to the sandbox, as are processes that a test starts by itself.
"""

import ast
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from .mutant import PACKAGE, ROOT, Function, Mutant, tree_of
from .sandbox import ARGUMENTS
from .verdicts import Job, Verdict

_SURVIVED, _KILLED, _NOT_HERE = 0, 1, 2


def judge_in_place(jobs: Sequence[Job], *, limit_s: float) -> dict[Mutant, Verdict]:
    """Verdicts of those that can be judged so."""
    with TemporaryDirectory(prefix="mutants-") as folder:
        said, verdicts = Path(folder) / "said", Path(folder) / "verdicts"
        verdicts.touch()
        pid = os.fork()  # why: this process must stay without the package, for the sandbox
        if pid == 0:
            _live(jobs, limit_s, said, verdicts)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
            raise RuntimeError(f"the tests cannot be collected:\n{said.read_text()[-2000:]}")
        rows = [json.loads(line) for line in verdicts.read_text().splitlines()]
    return {jobs[row["job"]][0]: Verdict(how=row["how"], killer=row["killer"]) for row in rows}


def _live(jobs: Sequence[Job], limit_s: float, said: Path, verdicts: Path) -> None:
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(said, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
        os.chdir(ROOT)
        sys.path[:0] = [str(PACKAGE.parent), str(ROOT)]
        files = sorted({test.split("::")[0] for _, tests in jobs for test in tests})
        wanted = [argument for argument in ARGUMENTS if argument != "-x"]
        code = int(pytest.main([*wanted, "-s", *files], plugins=[_Judge(jobs, limit_s, verdicts)]))
    finally:
        os._exit(code)


class _Judge:
    """Runs mutants in place of the tests."""

    def __init__(self, jobs: Sequence[Job], limit_s: float, verdicts: Path) -> None:
        self._jobs, self._limit_s, self._verdicts = jobs, limit_s, verdicts

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Once everything is collected."""
        items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()
        with self._verdicts.open("a") as file:
            for number, (mutant, names) in enumerate(self._jobs):
                tests = [items[name] for name in names if name in items]
                how, killer = self._judged(mutant, tests) if tests else ("unreached", "")
                if how:
                    file.write(json.dumps({"job": number, "how": how, "killer": killer}) + "\n")
        return True

    def _judged(self, mutant: Mutant, tests: Sequence[pytest.Item]) -> tuple[str, str]:
        heard, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run(mutant, tests, tell)
        os.close(tell)
        ends, status = time.monotonic() + self._limit_s, None
        while status is None and time.monotonic() < ends:
            ended, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
            time.sleep(0.002)
        if status is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with os.fdopen(heard) as stream:
            killer = stream.read()
        if status is None:
            return "timeout", ""
        return {_SURVIVED: "survived", _NOT_HERE: ""}.get(status, "killed"), killer


def _run(mutant: Mutant, tests: Sequence[pytest.Item], tell: int) -> None:
    code = _NOT_HERE
    try:
        os.setsid()
        if _put_in_place(mutant):
            code = _KILLED  # by whatever is raised from here on
            code = _KILLED if _first_red(tests, tell) else _SURVIVED
    finally:
        os._exit(code)


def _first_red(tests: Sequence[pytest.Item], tell: int) -> bool:
    for test, after in zip(tests, [*tests[1:], None], strict=True):
        if any(report.failed for report in runtestprotocol(test, nextitem=after, log=False)):
            os.write(tell, test.nodeid.encode())
            return True
    return False


def _put_in_place(mutant: Mutant) -> bool:
    """Whether the code of this process could be exchanged for the broken one."""
    name = ".".join(("steadystep", *Path(mutant.path).with_suffix("").parts)).removesuffix(".__init__")
    source = mutant.apply((PACKAGE / mutant.path).read_bytes())
    return exchange(importlib.import_module(name), tree_of(mutant.path), source, mutant.line)


def exchange(module: ModuleType, tree: ast.Module, source: bytes, line: int) -> bool:
    """Give a module what a line of its broken `source` defines; False where that cannot be done."""
    try:
        function = _outermost(tree.body, line, "")
        if function is None:
            return _constants(module, tree.body, ast.parse(source).body, "")
        codes = _codes(compile(source, str(module.__file__), "exec"))
        found = next(code for code in codes if (code.co_qualname, code.co_firstlineno) == function)
        _plain(module, *function).__code__ = found
    except (LookupError, AttributeError, ValueError, TypeError, StopIteration):
        return False
    return True


def _outermost(body: list[ast.stmt], line: int, prefix: str) -> tuple[str, int] | None:
    """The function around a line, but for its defaults: qualified name, and line of its first decorator."""
    for node in body:
        if not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if isinstance(node, Function):
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            return (prefix + node.name, first) if line >= node.body[0].lineno else None
        if isinstance(node, ast.ClassDef):
            return _outermost(node.body, line, f"{prefix}{node.name}.")
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _plain(module: ModuleType, name: str, first: int | None = None) -> FunctionType:
    """The function itself, without what decorators have put around it."""
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    waiting = [found]
    while waiting:
        each = waiting.pop()
        if isinstance(each, FunctionType) and not hasattr(each, "__wrapped__"):
            if first in (None, each.__code__.co_firstlineno) and each.__code__.co_qualname == name:
                return each
            continue
        inner = [getattr(each, key, None) for key in ("__wrapped__", "__func__", "func", "fget", "fset")]
        waiting += [one for one in inner if one is not None]
    raise LookupError(name)


def _constants(module: ModuleType, body: list[ast.stmt], broken: list[ast.stmt], prefix: str) -> bool:
    """Makes the one statement again that differs: an assignment of the module, or the defaults of a function."""
    changed = [pair for pair in zip(body, broken, strict=True) if ast.dump(pair[0]) != ast.dump(pair[1])]
    for old, new in changed:
        if isinstance(old, ast.ClassDef) and isinstance(new, ast.ClassDef):
            return _constants(module, old.body, new.body, f"{prefix}{old.name}.")
        if isinstance(new, Function):
            function, values = _plain(module, prefix + new.name), vars(module)
            function.__defaults__ = tuple(_value(each, values) for each in new.args.defaults)
            named = zip(new.args.kwonlyargs, new.args.kw_defaults, strict=True)
            function.__kwdefaults__ = {key.arg: _value(each, values) for key, each in named if each is not None}
            return True
        if prefix or not isinstance(new, ast.Assign | ast.AnnAssign):
            return False
        _assign(module, new)
    return bool(changed)


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "default", "eval"), names)


def _assign(module: ModuleType, statement: ast.Assign | ast.AnnAssign) -> None:
    """In the module, and wherever the same object was imported from it under the same name."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    before, after = {name: vars(module)[name] for name in names}, dict(vars(module))
    exec(compile(ast.Module([statement], []), "constant", "exec"), after)
    for name, old in before.items():
        for other in [module, *sys.modules.values()]:
            ours = getattr(other, "__name__", "").split(".")[0] in ("steadystep", "tests")
            if ours and vars(other).get(name, before) is old:
                vars(other)[name] = after[name]
