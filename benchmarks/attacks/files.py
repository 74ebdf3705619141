"""Files that are not what they should be, given to the command line: one clear line, no traceback, no hang.

A real run makes a log, an incident bundle and checkpoints; beside them lie settings, a script, a CSV file and a
`trainer_state.json`. Each case damages one of them as drawn from the seed (bits flipped, cut off, parts swapped,
doubled, zeroed or inserted, a value replaced by one of another kind) and gives it to the verbs that read such a file,
in this process. It passes when the verb ends within its time with 0 or 1 (read all the same), or with 2 and an error
of one line per mistake; nothing else may be raised, and nothing that a terminal obeys may be printed. Checkpoints and
bundles carry checksums, which are made right again in half of the cases: then what it says has to give it away.

    python benchmarks/attacks/files.py --seed 1 --out build/attacks/files.jsonl     # 3,000 cases
    python benchmarks/attacks/files.py --cases 100
"""

import argparse
import contextlib
import io
import os
import random
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
import typer
from file_damage import HOSTILE, damaged, odd_paths
from file_samples import Sample, make_samples
from table import Rows, arguments

import steadystep
from steadystep._utils.text import quiet_log
from steadystep.cli.app import app, told
from steadystep.errors import SteadystepError

_BYTES = 16 << 30
_SECONDS = 20.0  # of processor time: an idle machine needs well below one


class HangError(BaseException):
    """Not an Exception: nobody may catch it by accident."""


def main(argv: list[str] | None = None) -> int:
    """So many cases."""
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--cases", type=int, default=3000, help="how many files are damaged (default 3,000)")
    options = arguments(__doc__, argv, more=more)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))  # what reads without end must not take the machine along
    rng = random.Random(options.seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        Rows(options.out) as rows,
        quiet_log(),
        warnings.catch_warnings(action="ignore"),
    ):
        samples = make_samples(Path(folder) / "samples", options.seed, answer)
        for number in range(options.cases):
            sample = samples[number % len(samples)]
            attack(sample, rng, Path(folder) / "case", rows, number)
        for name, command in odd_paths(Path(folder) / "odd"):
            rows.add("odd paths", name, passed=not (said := answer(command)), said=said)
        return rows.finish()


def attack(sample: Sample, rng: random.Random, folder: Path, rows: Rows, number: int) -> None:
    """One damaged file through every verb that reads it."""
    with sample.copied(folder) as copy:
        how = damaged(copy.path, rng, text=sample.text)
        copy.sign(rng)
        for command in copy.commands:
            said = answer(command)
            if said:
                break
        rows.add(sample.kind, f"{number}: {how}", passed=not said, said=said and f"{command[0]}: {said}")


def answer(command: list[str]) -> str:
    """What was wrong with how a command ended; nothing when it ended as it should."""
    out, err = io.StringIO(), io.StringIO()
    code: Any
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _in_time(), _few_steps():
            code = app(command, standalone_mode=False)
    except SteadystepError as error:
        code = 2
        print(told(error), file=err)
    except (typer.Exit, click.exceptions.Exit) as end:
        code = end.exit_code
    except click.ClickException as error:
        code = 2
        print(f"error: {error.format_message()}", file=err)
    except SystemExit as end:
        code = end.code
    except HangError:
        return f"more than {_SECONDS:.0f} s of processor time"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return _wrong(code, out.getvalue(), err.getvalue())


def _wrong(code: Any, out: str, err: str) -> str:
    if code not in (None, 0, 1, 2, 130):
        return f"exit code {code!r}"
    if "Traceback (most recent call last)" in out + err:
        return "a traceback was printed"
    if any(sign in out + err for sign in HOSTILE):
        return "a control character reached the terminal"
    if code == 2:
        lines = [line for line in err.splitlines() if line.strip()]
        if not lines:
            return "exit code 2 without a word"
        if len(lines) > 21 or max(map(len, lines)) > 1000:
            return f"{len(lines)} lines of up to {max(map(len, lines))} letters"
    return ""


@contextlib.contextmanager
def _few_steps() -> Iterator[None]:
    """Settings that are read all the same would train for as long as they say: Ctrl-C after three steps."""
    steps = steadystep.Guard.step
    taken: list[None] = []

    def step(*given: Any, **more: Any) -> Any:
        taken.append(None)
        if len(taken) > 3:
            raise KeyboardInterrupt
        return steps(*given, **more)

    steadystep.Guard.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        steadystep.Guard.step = steps  # type: ignore[method-assign]


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def over(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGPROF, over)
    alarm = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 15 * _SECONDS)  # what waits uses no processor
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGPROF, before)
        signal.signal(signal.SIGALRM, alarm)


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "100")
    sys.exit(main())
