"""Files that hold several runs, and files that are no text: each run is read for itself."""

import builtins
import json
import math
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from steadystep.errors import ConfigError
from steadystep.runs import csv_and_databases, open_run, open_runs

LOSSES = {"a": [2.0 / (1 + i / 10) for i in range(60)], "b": [3.0 / (1 + i / 10) for i in range(60)]}


def check(path: Path, names: tuple[str, ...] = ("a", "b")) -> None:
    runs = open_runs(path)
    assert tuple(run.name for run in runs) == names
    for run, losses in zip(runs, LOSSES.values(), strict=False):
        assert run.loss.steps.tolist() == list(range(60))
        assert run.loss.values.tolist() == losses
        assert run.grad_norm.values.tolist() == [1.5] * 60
    first = open_run(path)
    assert first.loss.values.tolist() == LOSSES["a"]
    assert first.notes[-1] == "the file contains 2 runs ('a', 'b'): 'a' is read"


def panel(folder: Path) -> Path:
    names = [f"{run} - {metric}" for run in LOSSES for metric in ("loss", "grad_norm", "loss__MIN")]
    rows = [",".join(str(v) for v in (i, LOSSES["a"][i], 1.5, 0, LOSSES["b"][i], 1.5, 0)) for i in range(60)]
    return text(folder / "a.csv", [",".join(["Step", *names]), *rows])


def long_table(folder: Path) -> Path:
    rows = [f"{run},loss,{loss},{i},0" for run, losses in LOSSES.items() for i, loss in enumerate(losses)]
    rows += [f"{run},grad_norm,1.5,{i},0" for run in LOSSES for i in range(60)]
    return text(folder / "metrics.csv", ["run_id,key,value,step,timestamp", *rows])


def wide_table(folder: Path) -> Path:
    rows = [f"{i},{run},{losses[i]},1.5" for i in range(60) for run, losses in LOSSES.items()]
    return text(folder / "export.csv", ["step,run,loss,grad_norm", *rows])


def trackio(folder: Path) -> Path:
    path = folder / "project.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE metrics (id INTEGER, timestamp TEXT, run_name TEXT, step INT, metrics TEXT)")
        rows = [(run, i, json.dumps({"loss": losses[i], "train": {"grad_norm": 1.5}, "x": "y"}))
                for i in range(60) for run, losses in LOSSES.items()]  # fmt: skip
        db.executemany("INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES ('now', ?, ?, ?)", rows)
    return path


def mlflow(folder: Path) -> Path:
    path = folder / "mlflow.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE metrics (key TEXT, value REAL, timestamp INT, run_uuid TEXT, step INT, is_nan INT)")
        rows = [("loss", losses[i], run, i) for run, losses in LOSSES.items() for i in range(60)]
        rows += [("grad_norm", 1.5, run, i) for run in LOSSES for i in range(60)]
        db.executemany("INSERT INTO metrics VALUES (?, ?, 0, ?, ?, 0)", rows)
    return path


def parquet(folder: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet as files

    rows = [{"run_name": run, "step": i, "timestamp": "now", "loss": losses[i], "grad_norm": 1.5}
            for i in range(60) for run, losses in LOSSES.items()]  # fmt: skip
    files.write_table(pyarrow.Table.from_pylist(rows), folder / "metrics.parquet")
    return folder / "metrics.parquet"


def text(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("make", [panel, long_table, wide_table, trackio, mlflow, parquet])
def test_each_run_of_a_file_is_read(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    check(make(tmp_path))


def test_nan_in_a_database(tmp_path: Path) -> None:
    path = mlflow(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE metrics SET value = 0, is_nan = 1 WHERE key = 'loss' AND run_uuid = 'a' AND step = 59")
    assert math.isnan(open_run(path).loss.values[-1])
    path = trackio(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("""UPDATE metrics SET metrics = '{"loss": "NaN"}' WHERE run_name = 'a' AND step = 59""")
        db.execute("UPDATE metrics SET metrics = 'torn {' WHERE run_name = 'a' AND step = 3")
    found = open_run(path).loss
    assert math.isnan(found.values[-1])
    assert 3 not in found.steps


def test_a_folder_with_a_database_is_a_run(tmp_path: Path) -> None:
    trackio(tmp_path)
    assert len(open_runs(tmp_path)) == 2


def test_databases_that_are_none_get_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE people (name TEXT)")
    with pytest.raises(ConfigError, match="no table of metrics as Trackio or MLflow write it"):
        open_run(path)
    path.write_bytes(trackio(tmp_path).read_bytes()[:5000])
    with pytest.raises(ConfigError, match="this SQLite database"):
        open_run(path)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ConfigError, match=r"Parquet file (cannot be read|needs pyarrow)"):
        open_run(tmp_path / "torn.parquet")

    def missing(name: str) -> object:
        raise builtins.ImportError(name)

    monkeypatch.setattr(csv_and_databases, "import_module", missing)
    with pytest.raises(ConfigError, match="needs pyarrow: pip install pyarrow; or export it as CSV"):
        open_run(tmp_path / "torn.parquet")


def test_a_run_of_a_panel_without_a_loss_is_left_out(tmp_path: Path) -> None:
    rows = [f"{i},{loss},,1.5" for i, loss in enumerate(LOSSES["a"])]
    path = text(tmp_path / "a.csv", ["Step,a - loss,b - loss,a - grad_norm", *rows])
    assert [run.name for run in open_runs(path)] == ["a"]


def test_sparse_rows_of_lightning(tmp_path: Path) -> None:
    rows: list[str] = []
    for i, loss in enumerate(LOSSES["a"]):
        rows.append(f",,{10 * i},{loss},,1e-3")
        if i % 10 == 9:
            rows += [f"{i // 10},{loss},{10 * i},,,", f"{i // 10},,{10 * i},,{loss + 0.1},"]
    path = text(tmp_path / "metrics.csv", ["epoch,train_loss_epoch,step,train_loss_step,val_loss,lr-AdamW", *rows])
    run = open_run(path)
    assert run.loss.steps.tolist() == list(range(0, 600, 10))
    assert run.loss.values.tolist() == LOSSES["a"]
    assert run.validation["val_loss"].steps.tolist() == [90, 190, 290, 390, 490, 590]
    assert len(run.lr) == 60
    assert run.read.startswith("read 72 rows: step=step, loss=train_loss_step, lr=lr-AdamW, val_loss=val_loss")
