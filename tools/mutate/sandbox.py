"""Runs tests against a changed file in a forked child.

torch and pytest are imported once, in the parent; a child only imports the package and the test files it needs. The
package it sees is a folder of links with one real file, the broken one, so that processes which a test starts see
it as well.
"""

import ctypes
import gc
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from .mutant import PACKAGE, ROOT

ARGUMENTS = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
ARGUMENTS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # why: what is imported early keeps its plain asserts
NOTHING_COLLECTED = 5
UNCHANGED = "__init__.py"  # any file, put in place of itself where nothing is to be broken
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_BATCHES = (8, 32)  # the likeliest to notice go first, so that a child seldom imports many test files


def warm_up() -> None:
    """Imports what every child needs and nothing of ours."""
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", STEADYSTEP_HYPOTHESIS="mutants")
    for name in ("torch", "numpy", "hypothesis", "pydantic", "rich", "yaml", "safetensors.torch", "torch.distributed"):
        importlib.import_module(name)
    assert not any(name.split(".")[0] == "steadystep" for name in sys.modules)
    gc.collect()
    gc.freeze()


@contextmanager
def overlay(path: str, source: bytes) -> Iterator[Path]:
    """A folder to import the package from, all links but for one file."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        real, here = PACKAGE, Path(folder) / PACKAGE.name
        for part in Path(path).parts:
            here.mkdir()
            for entry in real.iterdir():
                # why: a cache that is shared would be believed for the broken file
                if entry.name not in (part, "__pycache__"):
                    (here / entry.name).symlink_to(entry)
            _link_caches(real, here, part)
            real, here = real / part, here / part
        here.write_bytes(source)
        yield Path(folder)


def _link_caches(real: Path, here: Path, part: str) -> None:
    (here / "__pycache__").mkdir()
    for cache in (real / "__pycache__").glob("*.pyc"):
        if cache.name.split(".")[0] != part.removesuffix(".py"):
            (here / "__pycache__" / cache.name).symlink_to(cache)


def run_pytest(tests: Sequence[str], plugins: Sequence[object] = ()) -> int:
    """In a child: 0 when all are green."""
    start = 0
    for end in (*_BATCHES, len(tests)):
        if batch := list(tests[start:end]):
            code = int(pytest.main([*ARGUMENTS, *batch], plugins=list(plugins)))
            if code not in (0, NOTHING_COLLECTED):
                return code
        start = max(start, end)
    return 0


class Child:
    """A forked process that runs a task with the package of a folder, for a limited time."""

    def __init__(self, folder: Path, task: Callable[[], int], *, limit_s: float) -> None:
        self._ends = time.monotonic() + limit_s
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            _live(folder, task)

    def poll(self) -> int | None:
        """The exit code, -1 after the time limit, or nothing yet."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self._end_group()
            return os.waitstatus_to_exitcode(status) & 0xFF
        if time.monotonic() < self._ends:
            return None
        self._end_group()
        os.waitpid(self.pid, 0)
        return -1

    def _end_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Until it is over."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


def _live(folder: Path, task: Callable[[], int]) -> None:
    code = 1
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        said = os.open(folder / "said", os.O_RDWR | os.O_CREAT)
        for stream in (0, 1, 2):
            os.dup2(said, stream)
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
        sys.path[:0] = [str(folder), str(ROOT)]
        importlib.invalidate_caches()
        code = task()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
