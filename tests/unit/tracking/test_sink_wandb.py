"""What W&B's own records say in an offline run. Its reader is no longer in Python, so the frames are opened here."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from steadystep import tracking
from steadystep.errors import ConfigError
from steadystep.testing import _calls, _on_a_thread
from steadystep.tracking import WandB

wandb = pytest.importorskip("wandb")
wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")

BLOCK = 32_768  # frames do not cross these: LevelDB's log format


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def frames(data: bytes) -> Iterator[bytes]:
    at, parts = 7, []  # after W&B's own header
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def records(folder: Path) -> list:
    paths = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    return [wandb_internal_pb2.Record.FromString(frame) for path in paths for frame in frames(path.read_bytes())]


def history(folder: Path) -> list[dict]:
    rows = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return rows


def test_an_offline_run_that_is_resumed(tmp_path: Path) -> None:
    for first in (0, 10):
        _on_a_thread(WandB(), list(_calls(tmp_path, first, 12)), f"from {first}")
    wandb.teardown()  # its own process has written everything when this returns
    rows = history(tmp_path)
    losses = [(row["step"], row["loss/train"]) for row in rows if "loss/train" in row]
    assert [step for step, _ in losses] == [*range(12), *range(10, 22)]
    assert losses[1] == (1, 0.5)
    assert next((row["step"], row["loss/validation"]) for row in rows if "loss/validation" in row) == (5, 2.0)
    assert next(row for row in rows if "grad/layer/embed.weight" in row)["grad/layer/embed.weight"] == 0.5
    assert any(row.get("incidents/non-finite-loss") == 1 for row in rows)
    counts = next(row["grad/values/wide/values"] for row in rows if "grad/values/wide/values" in row)
    assert sum(counts) == 100
    runs = [record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert len({run.run_id for run in runs}) == 1  # one run, to be merged when it is synced
    config = {item.key: item.value_json for item in runs[0].config.update}
    assert json.loads(config["mode"]) == "autopilot"


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"steadystep\[wandb\]"):
        WandB()
