"""Runs mutants and says which were noticed, and by which test."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from .mutant import PACKAGE, ROOT, Mutant
from .sandbox import ARGUMENTS, UNCHANGED, Child, overlay, run_pytest

VERDICTS = ROOT / "build" / "mutants" / "verdicts.jsonl"
Job = tuple[Mutant, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`killed`, `survived`, `unreached`; or not decided.

    Not decided are `timeout`, when the tests took too long, and `void`, when the killer is red without the mutant too.
    """

    how: str
    killer: str = ""

    @property
    def caught(self) -> bool:
        """A test noticed."""
        return self.how == "killed"


class FirstRed:
    """A pytest plugin that writes down the first test that fails."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each phase of each test."""
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid)


@dataclass(slots=True)
class _Running:
    mutant: Mutant
    child: Child
    stack: ExitStack
    killer: Path

    def verdict(self, code: int) -> Verdict:
        killer = self.killer.read_text() if self.killer.exists() else ""
        self.stack.close()
        return Verdict(how="timeout" if code < 0 else "killed" if code else "survived", killer=killer)


def judge(jobs: Iterable[Job], *, at_once: int, limit_s: float) -> Iterator[tuple[Mutant, Verdict]]:
    """Runs several children at a time."""
    running: list[_Running] = []
    waiting = iter(jobs)
    job = next(waiting, None)
    while job is not None or running:
        if job is not None and len(running) < at_once:
            if job[1]:
                running.append(_start(*job, limit_s))
            else:
                yield job[0], Verdict(how="unreached")
            job = next(waiting, None)
            continue
        for one in list(running):
            if (code := one.child.poll()) is not None:
                running.remove(one)
                yield one.mutant, one.verdict(code)
        time.sleep(0.01)


def _start(mutant: Mutant, tests: list[str], limit_s: float) -> _Running:
    stack = ExitStack()
    folder = stack.enter_context(overlay(mutant.path, mutant.apply((PACKAGE / mutant.path).read_bytes())))
    child = Child(folder, lambda: run_pytest(tests, [FirstRed(folder / "killer")]), limit_s=limit_s)
    return _Running(mutant, child, stack, folder / "killer")


def voided(verdicts: dict[Mutant, Verdict]) -> dict[Mutant, Verdict]:
    """The verdicts by tests that are red without any mutant: they prove nothing."""
    killers = sorted({verdict.killer for verdict in verdicts.values() if verdict.killer})
    with overlay(UNCHANGED, (PACKAGE / UNCHANGED).read_bytes()) as folder:
        red = folder / "red"

        def task() -> int:
            for killer in killers:
                if pytest.main([*ARGUMENTS, killer]):
                    with red.open("a") as file:
                        file.write(killer + "\n")
            return 0

        if killers and Child(folder, task, limit_s=60.0 * len(killers)).wait() != 0:
            raise RuntimeError(f"the tests do not run without a mutant:\n{(folder / 'said').read_text()[-2000:]}")
        sick = red.read_text().splitlines() if red.exists() else []
    return {m: Verdict(how="void", killer=v.killer) for m, v in verdicts.items() if v.killer in sick}


def known() -> dict[str, Verdict]:
    """Verdicts of earlier runs that hold."""
    lines = VERDICTS.read_text().splitlines() if VERDICTS.is_file() else []
    found = {row["key"]: Verdict(how=row["how"], killer=row["killer"]) for row in map(json.loads, lines)}
    return {key: verdict for key, verdict in found.items() if verdict.how != "void"}


def keep(mutant: Mutant, verdict: Verdict) -> None:
    """For the next run."""
    VERDICTS.parent.mkdir(parents=True, exist_ok=True)
    with VERDICTS.open("a") as file:
        file.write(json.dumps({"key": mutant.key, **asdict(verdict), **asdict(mutant)}) + "\n")


def table(verdicts: dict[Mutant, Verdict]) -> str:
    """Per package, how many were noticed. What is not decided counts as survived."""
    named = (("mutants", 9), ("killed", 8), ("survived", 10), ("unreached", 11), ("not decided", 13), ("survival", 10))
    rows = [f"{'package':<14}" + "".join(f"{name:>{width}}" for name, width in named)]
    for package in sorted({mutant.package for mutant in verdicts}):
        count = Counter(verdict.how for mutant, verdict in verdicts.items() if mutant.package == package)
        killed, total, undecided = count["killed"], count.total(), count["timeout"] + count["void"]
        counts = f"{total:>9}{killed:>8}{count['survived']:>10}{count['unreached']:>11}{undecided:>13}"
        rows.append(f"{package:<14}{counts}{1 - killed / total:>10.1%}")
    return "\n".join(rows)
