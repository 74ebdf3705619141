"""Every frozen decision is made again. To see all differences at once: `python -m tests.golden`."""

from pathlib import Path

import pytest

from tests.golden import files
from tests.golden.choice import chosen, is_quick
from tests.golden.trace import machine, trace_of


def _cases() -> list:
    return [
        pytest.param(path, id=path.stem, marks=() if is_quick(files.read(path)[0]) else pytest.mark.slow)
        for path in files.stored()
    ]


@pytest.mark.parametrize("path", _cases())
def test_the_frozen_decisions_are_made_again(path: Path) -> None:
    run, frozen = files.read(path)
    trace = trace_of(run)
    assert trace.decisions == frozen.decisions
    if machine() == files.read_machine():
        assert trace.bits == frozen.bits


def test_the_stored_traces_are_those_of_the_chosen_runs() -> None:
    assert [path.stem for path in files.stored()] == sorted(files.name_of(run) for run in chosen())
