import gc
import json
import logging
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import steadystep
from steadystep.records import BitFlip, Diagnosis, Finding, Outcome, Plan, Signals
from steadystep.tracking import RunLog, read
from steadystep.tracking.log_format import did
from tests.loops import batches, small_net, squared


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in (path / "run.jsonl").read_text().splitlines()]


def guard_on(tmp_path: Path, **config) -> tuple:
    model = small_net()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.5e-2), config=config, run_dir=tmp_path)
    return model, guard


def test_every_step_is_written_and_reads_back_exactly(tmp_path: Path) -> None:
    model, guard = guard_on(tmp_path, training={"max_grad_norm": 2.0})
    outcomes = [guard.step(lambda x=x: squared(model, x)) for x in batches(130)]
    guard.close()
    rows = [row for row in lines(tmp_path) if "kind" not in row]
    assert [r["step"] for r in rows] == list(range(130))
    for row, outcome in zip(rows, outcomes, strict=True):
        assert torch.tensor(row["loss"]).item() == outcome.loss
        assert row["norm"] == pytest.approx(outcome.signals.grad_norm, rel=1e-5)
        assert row["lr"] == 0.005
        assert row.get("clipped", False) == outcome.clipped
    assert any(o.clipped for o in outcomes)


def test_layers_at_a_cadence_and_around_an_incident(tmp_path: Path) -> None:
    model, guard = guard_on(tmp_path, monitoring={"log_frequency": 10})
    for i, x in enumerate(batches(25)):
        guard.step(lambda x=x, i=i: squared(model, x * (math.nan if i == 13 else 1.0)))
    guard.close()
    layers = [row for row in lines(tmp_path) if row.get("kind") == "layers"]
    assert [row["step"] for row in layers] == [0, *range(10, 19), 20]  # five steps before and after
    assert layers[0]["names"][0] == "0.weight"
    assert layers[4]["norms"][0] == "NaN"
    assert all("names" not in row for row in layers[1:])
    incident = next(row for row in lines(tmp_path) if row.get("kind") == "incident")
    assert incident["step"] == 13
    assert incident["plan"]["actions"] == ["skip-step"]
    assert incident["diagnosis"]["cause"] == "non-finite-loss"


def test_metrics_and_scale_are_logged(tmp_path: Path) -> None:
    model, guard = guard_on(tmp_path, training={"mixed_precision": "fp16"})
    x = batches(1)[0]
    guard.step(lambda: squared(model, x), metrics={"kl": 0.5, "entropy": math.nan})
    guard.close()
    row = lines(tmp_path)[1]
    assert row["metrics"] == {"kl": 0.5, "entropy": "NaN"}
    assert row["scale"] == 65536.0


def test_a_second_run_in_the_folder_is_appended_after_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"kind": "start"}\n{"step":0,"lo')
    guard_on(tmp_path)[1].close()
    written = (tmp_path / "run.jsonl").read_text().splitlines()
    assert written[1] == '{"step":0,"lo'
    assert json.loads(written[2])["kind"] == "start"


def test_an_incident_is_on_disk_at_once(tmp_path: Path) -> None:
    model, guard = guard_on(tmp_path)
    x = batches(1)[0] * math.nan
    guard.step(lambda: squared(model, x))
    assert any(row.get("kind") == "incident" for row in lines(tmp_path))


def test_nothing_is_lost_without_close(tmp_path: Path) -> None:
    model, guard = guard_on(tmp_path)
    for x in batches(7):
        guard.step(lambda x=x: squared(model, x))
    del guard
    gc.collect()
    assert sum("step" in row for row in lines(tmp_path) if "kind" not in row) == 7


@pytest.mark.slow
def test_nothing_is_lost_when_the_program_ends_and_a_forked_one_leaves_it_alone(tmp_path: Path) -> None:
    code = f"""
import os, torch, steadystep
model = torch.nn.Linear(2, 1)
guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir={str(tmp_path)!r})
for _ in range(5):
    guard.step(lambda: model(torch.ones(1, 2)).sum())
if os.fork() == 0:
    raise SystemExit
os.wait()
raise RuntimeError("no more data")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.endswith("RuntimeError: no more data\n")
    assert sum("kind" not in row for row in lines(tmp_path)) == 5
    assert [row["kind"] for row in lines(tmp_path) if "kind" in row] == ["start", "layers", "probe", "probe", "end"]
    assert read(tmp_path).error == "RuntimeError: no more data"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_reported_once_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        model, guard = guard_on(tmp_path)
        assert all(guard.step(lambda x=x: squared(model, x)).stepped for x in batches(250))
        guard.close()
    assert len([r for r in caplog.records if "training continues" in r.message]) == 1
    assert guard.updates == 250


def test_a_run_dir_that_cannot_be_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(steadystep.ConfigError, match="run_dir"):
        guard_on(tmp_path / "file")
    guard_on(tmp_path)  # the failed guard let go of its optimizer


def test_incidents_are_said_and_routine_is_not(caplog: pytest.LogCaptureFixture) -> None:
    model = small_net()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = batches(1)[0]
    with caplog.at_level(logging.WARNING):
        guard.step(lambda: squared(model, x))
        assert not caplog.records
        guard.step(lambda: squared(model, x * math.nan))
    assert "step 1: the loss is NaN" in caplog.text
    assert "update skipped [non-finite-loss]" in caplog.text


def test_the_header_tells_settings_and_parameters(tmp_path: Path) -> None:
    guard_on(tmp_path, training={"max_grad_norm": 2.0})[1].close()
    header = lines(tmp_path)[0]
    assert header["settings"]["training"]["max_grad_norm"] == 2.0
    assert header["parameters"] == sum(p.numel() for p in small_net().parameters())
    assert header["names"][:2] == ["0.weight", "0.bias"]


def test_an_incident_tells_what_was_done_where_it_began_and_where_its_bundle_is(tmp_path: Path) -> None:
    model, guard = guard_on(tmp_path / "run")
    for i, x in enumerate(batches(5)):
        guard.step(lambda x, i=i: squared(model, x * (math.nan if i == 3 else 1.0)), batch=x)
    guard.close()
    (tmp_path / "run").rename(tmp_path / "moved")
    line = next(row for row in lines(tmp_path / "moved") if row.get("kind") == "incident")
    assert line["done"] == "update skipped"
    assert "Sequential" in line["origin"]
    (incident,) = read(tmp_path / "moved").incidents
    assert (incident.step, incident.stepped, incident.severity) == (3, False, "critical")
    assert (Path(incident.bundle) / "incident.json").exists()


def run_with(model, guard, folder: Path, error: BaseException | None) -> None:
    guard.step(lambda: squared(model, batches(1)[0]))
    assert not read(folder).ended
    if error is not None:
        raise error


@pytest.mark.parametrize(
    ("error", "how"),
    [(None, "finished"), (KeyboardInterrupt(), "stopped"), (RuntimeError("out of luck"), "error")],
)
def test_the_last_line_tells_how_it_ended(tmp_path: Path, error: BaseException | None, how: str) -> None:
    model, guard = guard_on(tmp_path)
    with nullcontext() if error is None else pytest.raises(type(error)), guard:
        run_with(model, guard, tmp_path, error)
    assert lines(tmp_path)[-1]["how"] == how
    run = read(tmp_path)
    assert (run.ended, run.end) == (True, how)
    assert ("out of luck" in run.error) == (how == "error")


def test_halting_is_stopping(tmp_path: Path) -> None:
    model, guard = guard_on(tmp_path, recovery={"max_skips_in_a_row": 2})
    x = batches(1)[0] * math.nan
    with pytest.raises(steadystep.TrainingHalted), guard:
        [guard.step(lambda: squared(model, x)) for _ in range(5)]
    assert read(tmp_path).end == "stopped"


def signals_at(step: int, names: tuple[str, ...], **changes) -> Signals:
    plain = {"loss": 2.0 + 1 / (step + 3), "grad_norm": 1 / (step + 7), "lr": 1e-3 / (step + 3), "names": names}
    return Signals(step=step, **{**plain, "norms": tuple(0.123456789 + i for i in range(len(names))), **changes})


def test_a_large_model_and_much_trouble_stay_within_bounds(tmp_path: Path) -> None:
    """The densest there is: clipped, metrics and an incident at every tenth step, a thousand tensors."""
    names = tuple(f"transformer.blocks.{i}.attention.query.weight" for i in range(1000))
    log = RunLog(tmp_path, layers_every=100)
    finding = Finding(
        detector="loss-spike", step=0, severity="warn", value=9.0, limit=3.0, what="it is high", where=names
    )
    trouble = Diagnosis(cause="bad-batch", findings=(finding,), evidence="the loss is high", advice="look at the batch")
    metrics = dict.fromkeys(("kl", "entropy", "reward", "clip_fraction", "value_loss"), 0.123456789)
    steps = 4_000
    for i in range(steps):
        step = i * 250  # a million steps of a run, every 250th: what may be written grows with the step's number
        diagnosis, plan = (trouble, Plan(actions=("skip-step",))) if i % 10 == 0 else (Diagnosis(), Plan())
        log.record(
            Outcome(
                step=step,
                reading=2.0,
                stepped=plan.proceeds,
                clipped=True,
                plan=plan,
                diagnosis=diagnosis,
                signals=signals_at(step, names, metrics=metrics),
            )
        )
    log.close()
    text = (tmp_path / "run.jsonl").read_text()
    rows = sum(len(line.partition(',"metrics"')[0]) + 2 for line in text.splitlines() if line.startswith('{"step"'))
    assert rows / steps <= 82  # bytes of a step itself
    assert len(text) - rows <= 17.1e6  # all else in a million steps
    run = read(tmp_path)
    assert len(run.loss) == steps
    assert run.layers is not None
    assert len(run.layers.names) == 1000
    assert run.layers.steps[-1] > 900_000  # coarser, not over
    assert run.incidents[-1].step > 900_000
    assert run.metrics["kl"].steps[-1] > 900_000


def test_the_learning_rate_in_the_log_is_the_one_used(tmp_path: Path) -> None:
    """What the user asked for at a leap is in the incident; the curve shows what the weights saw."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with steadystep.Guard(model, optimizer, run_dir=tmp_path) as guard:
        for step in range(60):
            optimizer.param_groups[0]["lr"] = 1.0 if step == 50 else 0.01
            x = torch.randn(8, 4)
            guard.step(lambda x=x: model(x).square().mean())
    run = read(tmp_path)
    assert set(run.lr.values) == {0.01}
    assert [incident.step for incident in run.incidents if incident.severity == "act"] == [50]


def test_slow_steps_are_readable_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("steadystep.tracking.run_log.time.monotonic", lambda: now[0])
    log = RunLog(tmp_path, layers_every=1000)
    for step, at in ((0, 100.2), (1, 100.9), (2, 101.1), (3, 101.2)):
        now[0] = at
        signals = Signals(step=step + 1, loss=1.0, losses=(1.0,), grad_norm=1.0, lr=0.1)
        log.record(Outcome(step=step + 1, reading=1.0, stepped=True, signals=signals))
        assert len(read(tmp_path).loss) == (0 if step < 2 else 3)
    log.close()


def test_the_ranks_of_an_incident_are_in_its_record(tmp_path: Path) -> None:
    odd = ("0.weight on rank 1, 4", "0.bias on some rank")
    signals = Signals(step=7, loss=math.nan, losses=(math.nan,), grad_norm=math.nan, bad_ranks=(3,), odd_replicas=odd)
    finding = Finding(detector="non-finite", step=7, severity="critical", value=math.nan, limit=1.0, what="on rank 9")
    outcome = Outcome.of(Plan(), signals, Diagnosis(cause="unknown", findings=(finding,)), stepped=False)
    log = RunLog(tmp_path, layers_every=100)
    log.record(outcome)
    log.close()
    assert read(tmp_path).incidents[0].ranks == (1, 3, 4)


def test_a_bit_that_was_put_back_is_said() -> None:
    flip = BitFlip(tensor="head.weight", index=3, bit=20, repaired=True)
    signals = Signals(step=5, loss=1.0, grad_norm=1.0, bit_flips=(flip,))
    assert did(Outcome(step=5, reading=1.0, stepped=True, signals=signals)) == "bit put back, then updated"
    lost = replace(signals, bit_flips=(replace(flip, repaired=False),))
    assert did(Outcome(step=5, reading=1.0, stepped=True, signals=lost)) == "updated"
