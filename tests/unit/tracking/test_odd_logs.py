"""What a run log leaves out, and what its reader makes of that."""

import gc
import json
import sys
from pathlib import Path

import pytest

from steadystep.errors import ConfigError
from steadystep.records import Diagnosis, Finding, Outcome, Signals
from steadystep.tracking import Allowance, RunLog, read

HEADER = '{"kind": "start", "steadystep": "0"}\n'


def outcome(step: int, *, scale: float | None = None, trouble: bool = False) -> Outcome:
    finding = Finding(detector="loss-spike", step=step, severity="warn", value=9.0, limit=3.0, what="high")
    return Outcome(
        step=step,
        reading=2.0,
        stepped=True,
        diagnosis=Diagnosis(cause="bad-batch", findings=(finding,)) if trouble else Diagnosis(),
        signals=Signals(step=step, loss=2.0, grad_norm=1.0, scale=scale or 1.0, scaled=scale is not None),
    )


def scales(folder: Path) -> dict[int, float]:
    series = read(folder).scale
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def test_an_error_of_an_earlier_cell_is_not_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", NameError("an earlier cell"), raising=False)
    log = RunLog(tmp_path / "a", layers_every=10)
    del log
    gc.collect()
    assert read(tmp_path / "a").end == "finished"
    log = RunLog(tmp_path / "b", layers_every=10)
    monkeypatch.setattr(sys, "last_value", ValueError("while it ran"), raising=False)
    del log
    gc.collect()
    assert read(tmp_path / "b").error == "ValueError: while it ran"


def test_incidents_without_room_are_counted_to_the_last(tmp_path: Path) -> None:
    log = RunLog(tmp_path, layers_every=10)
    log._for_incidents = Allowance(0.0, 150.0)
    for step in range(99):
        log.record(outcome(step, trouble=True))
    log._for_incidents = Allowance(0.0, 0.0)
    log.record(outcome(99, trouble=True))
    log.close()
    run = read(tmp_path)
    missing = 100 - len(run.incidents)
    assert 0 < len(run.incidents) < 100
    assert any(f"{missing} more incidents" in note for note in run.notes)
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])["unwritten"] > 0


def test_a_scale_is_written_when_it_changes_and_known_at_every_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path, layers_every=10_000)
    wanted = {step: 65536.0 if step < 70 else 32768.0 for step in range(1500)}
    for step, scale in wanted.items():
        log.record(outcome(step, scale=scale))
    log.close()
    text = (tmp_path / "run.jsonl").read_text()
    assert text.count('"scale"') == 3  # the first, the change, and one at the thousandth step
    assert scales(tmp_path) == wanted


def test_a_scale_after_going_back_and_after_a_restart(tmp_path: Path) -> None:
    log = RunLog(tmp_path, layers_every=10_000)
    for step in (*range(60), *range(40, 80)):
        log.record(outcome(step, scale=8.0 if step < 50 and step not in range(40, 50) else 4.0))
    log.close()
    assert scales(tmp_path) == {step: 8.0 if step < 40 else 4.0 for step in range(80)}
    log = RunLog(tmp_path, layers_every=10_000)
    for step in range(80, 90):
        log.record(outcome(step))
    log.close()
    assert max(scales(tmp_path)) == 79


def test_a_scale_that_was_kept_while_going_back_is_said_again(tmp_path: Path) -> None:
    log = RunLog(tmp_path, layers_every=10_000)
    for step in range(60):
        log.record(outcome(step, scale=8.0 if step < 50 else 4.0))
    for step in range(40, 60):
        log.record(outcome(step, scale=4.0))
    log.close()
    assert scales(tmp_path) == {step: 8.0 if step < 40 else 4.0 for step in range(60)}


@pytest.mark.parametrize("step", [-5, 2**62])
def test_what_is_no_step_leaves_the_others_alone(tmp_path: Path, step: int) -> None:
    rows = "".join(f'{{"step":{i},"loss":1.0,"norm":1.0,"lr":0.1}}\n' for i in (*range(20), step))
    (tmp_path / "run.jsonl").write_text(HEADER + rows)
    run = read(tmp_path)
    assert len(run.loss) == 20
    assert any("1 line could not be read" in note for note in run.notes)


def test_an_empty_log_is_an_error_and_one_that_has_begun_is_not(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text("")
    with pytest.raises(ConfigError, match="the log is empty"):
        read(tmp_path)
    (tmp_path / "run.jsonl").write_text(HEADER)
    assert len(read(tmp_path).loss) == 0
