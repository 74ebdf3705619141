import gc
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import steadystep
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
        assert row["norm"] == pytest.approx(outcome.signals.grad_norm, rel=1e-8)
        assert row["lr"] == 0.005
        assert row.get("clipped", False) == outcome.clipped
    assert any(o.clipped for o in outcomes)


def test_layers_at_a_cadence_and_around_an_incident(tmp_path: Path) -> None:
    model, guard = guard_on(tmp_path, monitoring={"log_frequency": 10})
    for i, x in enumerate(batches(25)):
        guard.step(lambda x=x, i=i: squared(model, x * (math.nan if i == 13 else 1.0)))
    guard.close()
    layers = [row for row in lines(tmp_path) if row.get("kind") == "layers"]
    assert [row["step"] for row in layers] == [0, 10, 13, 20]
    assert layers[0]["names"][0] == "0.weight"
    assert layers[2]["norms"][0] == "NaN"
    assert "names" not in layers[1]
    incident = next(row for row in lines(tmp_path) if row.get("kind") == "incident")
    assert incident["step"] == 13
    assert incident["plan"]["steps"] == ["skip-step"]
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


def test_nothing_is_lost_when_the_program_ends(tmp_path: Path) -> None:
    code = f"""
import torch, steadystep
model = torch.nn.Linear(2, 1)
guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir={str(tmp_path)!r})
for _ in range(5):
    guard.step(lambda: model(torch.ones(1, 2)).sum())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert sum("kind" not in row for row in lines(tmp_path)) == 5


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_reported_once_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        model, guard = guard_on(tmp_path)
        assert all(guard.step(lambda x=x: squared(model, x)).stepped for x in batches(250))
        guard.close()
    assert len([r for r in caplog.records if "training goes on" in r.message]) == 1
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
