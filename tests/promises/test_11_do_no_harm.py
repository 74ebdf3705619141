"""Promise 11: a guarded run never ends worse than without a guard, beyond noise, and a healthy run is never touched.

A few short programs of the develop half of the field, which draws task, schedule, optimizer and framework by the index.
The whole of it: `make field`, with its table in benchmarks/field.md. What was seen to go wrong: tests/seen.
"""

from dataclasses import replace
from itertools import islice

import pytest

from tests.field.plan import Run, runs
from tests.field.row import row_of
from tests.field.table import line_of

SHORT = [run for run in runs(400, "develop") if run.num_steps <= 500]
HEALTHY = list(islice((run for run in SHORT if run.fault is None and run.num_steps <= 300), 4))
NAN_WEIGHT = [run for run in runs(400, "develop") if run.fault == "nan-weight"]
FAULTY = [run for run in NAN_WEIGHT if run.index in (72, 354)]  # ten seconds each
SHORTENED = [replace(run, num_steps=250) for run in FAULTY if run.index == 72]


def name_of(run: Run) -> str:
    return f"{run.index}-{run.task}-{run.optimizer}-{run.face}"


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, id=name_of(run), marks=() if i < 2 else pytest.mark.slow) for i, run in enumerate(HEALTHY)],
)
def test_a_healthy_run_is_never_touched(run: Run) -> None:
    row = row_of(run)
    assert row["identical"], line_of(row | {"code": ""})
    assert (row["warnings"], row["acts"], row["cause"], row["error"]) == (0, 0, "healthy", "")


@pytest.mark.parametrize(
    "run",
    [
        *(pytest.param(run, id=f"{name_of(run)}-shortened") for run in SHORTENED),
        *(pytest.param(run, id=name_of(run), marks=pytest.mark.slow) for run in FAULTY),
    ],
)
def test_a_faulty_run_never_ends_worse(run: Run) -> None:
    row = row_of(run)
    assert not row["harm"], line_of(row | {"code": ""})
    assert row["acts"] > 0  # a guard that no longer acts is not a pass
