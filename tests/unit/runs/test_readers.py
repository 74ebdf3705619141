"""Other people's logs: each format is read for what it is, and what is none gets a message."""

import csv
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steadystep.errors import ConfigError
from steadystep.runs.diagnosis import diagnose
from steadystep.runs.open import find_runs, open_run
from steadystep.runs.reading import Reading
from steadystep.runs.table import guess

LOSSES = [round(2.0 / (1 + i / 10), 6) for i in range(60)]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def table(path: Path, header: str, rows: list[str]) -> Path:
    return write(path, "\n".join([header, *rows]) + "\n")


@pytest.mark.parametrize(
    ("names", "role", "expected"),
    [
        (["step", "Loss/train", "Loss/validation", "LR"], "loss", "Loss/train"),
        (["train_loss_step", "train_loss_epoch", "val_loss"], "loss", "train_loss_step"),
        (["loss_scale", "lm loss"], "loss", "lm loss"),
        (
            ["train/loss", "eval/loss", "train/grad_norm", "train/learning_rate", "train/global_step"],
            "val_loss",
            "eval/loss",
        ),
        (["train/grad_norm", "param_norm"], "grad_norm", "train/grad_norm"),
        (["Grad/norm", "Grad/norm/layer0"], "grad_norm", "Grad/norm"),
        (["lr-AdamW", "loss"], "lr", "lr-AdamW"),
        (["_step", "epoch", "iteration"], "step", "_step"),
        (["accuracy", "val_accuracy"], "loss", None),
    ],
)
def test_names_are_guessed(names: list[str], role: str, expected: str | None) -> None:
    assert guess(names).get(role) == expected


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_csv_with_any_delimiter(tmp_path: Path, delimiter: str) -> None:
    rows = [delimiter.join(map(str, (10 * i, loss, "", 1e-3))) for i, loss in enumerate(LOSSES)]
    run = open_run(table(tmp_path / "log.csv", delimiter.join(["iter", "loss", "val_loss", "lr"]), rows))
    assert run.source == "csv"
    assert run.loss.steps.tolist() == list(range(0, 600, 10))
    assert run.loss.values.tolist() == LOSSES
    assert len(run.lr) == 60
    assert "val_loss" not in run.validation


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "a,b", [f"{i},{loss}" for i, loss in enumerate(LOSSES)])
    run = open_run(path, {"step": "a", "loss": "b"})
    assert run.loss.values.tolist() == LOSSES
    with pytest.raises(ConfigError, match="did you mean 'b'"):
        open_run(path, {"loss": "bb"})
    with pytest.raises(ConfigError, match="a column can be step, loss"):
        open_run(path, {"los": "b"})


def test_an_export_of_wandb(tmp_path: Path) -> None:
    rows = [f'"{i}","{loss}","{loss}","{loss}"' for i, loss in enumerate(LOSSES)]
    header = '"Step","run-7 - train/loss","run-7 - train/loss__MIN","run-7 - train/loss__MAX"'
    run = open_run(table(tmp_path / "wandb_export.csv", header, rows))
    assert run.loss.values.tolist() == LOSSES
    assert not run.metrics


def test_a_history_of_mlflow_has_one_number_per_row(tmp_path: Path) -> None:
    rows = [f"id1,train_loss,{loss},{i},0" for i, loss in enumerate(LOSSES)]
    rows += [f"id1,val_loss,{1.0},{i},0" for i in range(0, 60, 10)]
    run = open_run(table(tmp_path / "metrics.csv", "run_id,key,value,step,timestamp", rows))
    assert run.loss.values.tolist() == LOSSES
    assert len(run.validation["val_loss"]) == 6


def test_a_download_of_tensorboard_names_its_curve_by_the_file(tmp_path: Path) -> None:
    rows = [f"1700000000.0,{i},{loss}" for i, loss in enumerate(LOSSES)]
    run = open_run(table(tmp_path / "run-train-tag-loss.csv", "Wall time,Step,Value", rows))
    assert run.loss.values.tolist() == LOSSES


def test_nan_is_a_value_unless_it_means_not_logged(tmp_path: Path) -> None:
    rows = [f"{i},{'nan' if i >= 50 else loss},{'1.0' if i % 10 == 0 else 'nan'}" for i, loss in enumerate(LOSSES)]
    run = open_run(table(tmp_path / "a.csv", "step,loss,val_loss", rows))
    assert np.isnan(run.loss.values[50:]).all()
    assert run.validation["val_loss"].values.tolist() == [1.0] * 6


def test_a_resumed_run_writes_its_last_steps_again(tmp_path: Path) -> None:
    rows = [f"{i},1.0" for i in range(50)] + [f"{i},2.0" for i in range(40, 90)]
    run = open_run(table(tmp_path / "a.csv", "step,loss", rows))
    assert run.restarts == (40,)
    assert run.loss.steps.tolist() == list(range(90))
    assert run.loss.values[39:41].tolist() == [1.0, 2.0]


def test_a_second_run_in_the_same_file_is_the_one_that_counts(tmp_path: Path) -> None:
    rows = [f"{i},1.0" for i in range(50)] + [f"{i},2.0" for i in range(60)] + ["0,3.0", "1,3.0"]
    run = open_run(table(tmp_path / "a.csv", "step,loss", rows))
    assert run.loss.values.tolist() == [2.0] * 60
    assert run.restarts == ()
    assert any("several runs" in note for note in run.notes)
    assert any("aborted start of 2 points" in note for note in run.notes)


def test_rows_in_no_order_are_sorted(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(60)
    run = open_run(table(tmp_path / "a.csv", "step,loss", [f"{i},{LOSSES[i]}" for i in order]))
    assert run.loss.values.tolist() == LOSSES
    assert run.restarts == ()


def test_json_lines_lists_and_columns(tmp_path: Path) -> None:
    rows = [{"_step": i, "train": {"loss": loss}, "note": "x"} for i, loss in enumerate(LOSSES)]
    lines = [json.dumps(row) for row in rows]
    lines.insert(3, '{"torn')
    found = [
        open_run(write(tmp_path / "a.jsonl", "\n".join(lines))),
        open_run(write(tmp_path / "b.json", json.dumps(rows, indent=1))),
        open_run(write(tmp_path / "c.json", json.dumps({"loss": LOSSES, "lr": [1e-3] * 60}))),
        open_run(write(tmp_path / "d.log", "\n".join(lines))),
    ]
    assert [run.loss.values.tolist() for run in found] == [LOSSES] * 4
    assert any("1 lines could not be read" in note for note in found[0].notes)


def trainer_state(folder: Path, losses: list[float], norms: list[float]) -> Path:
    history = [
        {"epoch": 0.1, "step": 10 * i, "loss": loss, "grad_norm": norm, "learning_rate": 1e-4}
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]
    history.append({"step": 100, "eval_loss": 0.7, "eval_runtime": 3.0})
    history.append({"step": 600, "train_loss": 0.9, "train_runtime": 60.0, "total_flos": 1e18})
    return write(folder / "trainer_state.json", json.dumps({"log_history": history, "global_step": 600}))


def test_a_trainer_state(tmp_path: Path) -> None:
    trainer_state(tmp_path / "out" / "checkpoint-500", LOSSES[:50], [1.0] * 50)
    trainer_state(tmp_path / "out" / "checkpoint-600", LOSSES, [1.0] * 60)
    run = open_run(tmp_path / "out")
    assert (run.source, run.name) == ("transformers", "checkpoint-600")
    assert run.loss.values.tolist() == LOSSES
    assert run.validation["val_loss"].values.tolist() == [0.7]
    assert "train_loss" not in run.metrics


def test_a_loss_of_zero_beside_nan_is_a_hidden_nan(tmp_path: Path) -> None:
    losses = [*LOSSES[:40], *[0.0] * 20]
    path = trainer_state(tmp_path, losses, [*[1.0] * 40, *[math.nan] * 20])
    reading = diagnose(open_run(path))
    assert (reading.findings[0].kind, reading.findings[0].severity, reading.findings[0].step) == (
        "hidden-nan",
        "critical",
        400,
    )
    assert "the gradient norm there is NaN" in reading.findings[0].evidence
    assert "logging_nan_inf_filter" in reading.findings[0].advice


def events(folder: Path, curves: dict[str, list[tuple[int, float]]], suffix: str = "") -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
        for tag, points in curves.items():
            for step, value in points:
                writer.add_scalar(tag, value, step)


def test_event_files(tmp_path: Path) -> None:
    events(
        tmp_path, {"Loss/train": list(enumerate(LOSSES)), "LR": [(i, 1e-3) for i in range(60)], "Grad/norm": [(5, 2.0)]}
    )
    events(tmp_path / "validation", {"Loss/validation": [(i, 1.0) for i in range(0, 60, 10)]})
    run = open_run(tmp_path)
    assert run.source == "tensorboard"
    np.testing.assert_allclose(run.loss.values, LOSSES, rtol=1e-6)
    assert run.lr.steps.tolist() == list(range(60))
    assert run.grad_norm.values.tolist() == [2.0]
    assert len(run.validation["val_loss"]) == 6


def test_two_runs_that_share_a_folder_are_not_mixed(tmp_path: Path) -> None:
    events(tmp_path, {"train/loss": [(i, 5.0) for i in range(50)]}, suffix=".a")
    events(tmp_path, {"train/loss": [(i, 2.0) for i in range(40, 80)]}, suffix=".b")
    run = open_run(tmp_path)
    assert run.loss.steps.tolist() == list(range(80))
    assert run.loss.values.tolist() == [5.0] * 40 + [2.0] * 40
    assert run.restarts == (40,)


def test_runs_in_folders_of_their_own_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        events(tmp_path / name, {"loss": list(enumerate(LOSSES))})
    assert [path.name for path in find_runs(tmp_path)] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"found 2 runs here \(a, b"):
        open_run(tmp_path)
    assert len(open_run(tmp_path / "a").loss) == 60


def test_an_event_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    events(tmp_path, {"loss": list(enumerate(LOSSES))})
    file = next(tmp_path.glob("*tfevents*"))
    file.write_bytes(file.read_bytes()[:-500])
    run = open_run(file)
    assert 40 < len(run.loss) < 60
    assert any("middle of a record" in note for note in run.notes)


def test_our_own_log(tmp_path: Path) -> None:
    rows = [json.dumps({"step": i, "loss": loss, "norm": 1.0, "lr": 1e-3}) for i, loss in enumerate(LOSSES)]
    write(tmp_path / "r" / "run.jsonl", "\n".join(['{"kind": "start", "steadystep": "0.1.0"}', *rows]) + "\n")
    for path in (tmp_path, tmp_path / "r", tmp_path / "r" / "run.jsonl"):
        run = open_run(path)
        assert run.source == "steadystep"
        assert run.loss.values.tolist() == LOSSES


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "empty"),
        ("a.csv", b"   \n\n", "empty"),
        ("a.csv", b"step,loss\n", "a header and no rows"),
        ("a.csv", b"who,what\nme,nothing\nyou,that\n", "no column contains numbers"),
        ("a.csv", b"a,b\n1,2\n3,4\n", "--column loss="),
        ("a.pt", b"\x80\x02}q\x00.", "pickle, which is never loaded"),
        ("a.pt", b"PK\x03\x04rest", "archive"),
        ("a.csv", b"\x00\x01\x02\x03", "not a text file"),
        ("a.json", b'{"log_history": []}', "log_history is empty"),
        ("a.json", b'{"log_history": [{"step": 1', "is it truncated"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.jsonl", b"hello\nworld\n", "no line is a JSON object"),
        ("events.out.tfevents.1", b"\x05" * 100, "contain no scalars"),
        ("events.out.tfevents.1", struct.pack("<QI", 4, 0) + b"\xff\xff\xff\xff1234", "contain no scalars"),
    ],
)
def test_what_is_no_log_gets_a_message(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        diagnose(open_run(tmp_path / name))


def test_places_where_nothing_is(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "no log in this folder"),
        (tmp_path / "b", "no such file"),
        ("x" * 5000, "not a path"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_run(path)


cells = st.one_of(
    st.floats(width=64).map(repr),
    st.sampled_from(
        ["", "nan", "1e999", "-inf", "NaN", "None", "9" * 5000, "true", "{}", '"', "1;2", "\x1b[31m", "'", "ß"]
    ),
    st.integers(-(10**30), 10**30).map(str),
    st.text(max_size=4),
)


@given(
    st.sampled_from(["a.csv", "a.tsv", "a.txt", "a.jsonl", "a.json", "events.out.tfevents.9", "trainer_state.json"]),
    st.binary(max_size=300),
)
@example("a.csv", b"step,loss\n" + b"1e308,1e308\n-1e308,-1e308\n" * 20)
@example("a.csv", b"\xff\xfes\x00t\x00")
def test_any_bytes_are_a_reading_or_a_message(name: str, content: bytes) -> None:
    survives(name, content)


@given(st.lists(st.lists(cells, min_size=2, max_size=4), min_size=13, max_size=40))
def test_any_cells_are_a_reading_or_a_message(rows: list[list[str]]) -> None:
    survives(
        "a.csv", "\n".join(["step,loss,grad_norm,val_loss", *(",".join(row) for row in rows)]).encode(errors="replace")
    )


numbers = st.one_of(
    st.floats(), st.integers(), st.booleans(), st.none(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)


@given(
    st.lists(st.dictionaries(st.sampled_from(["step", "loss", "grad_norm", "eval_loss", "lr"]), numbers), max_size=30)
)
def test_any_history_is_a_reading_or_a_message(rows: list[dict[str, object]]) -> None:
    survives("trainer_state.json", json.dumps({"log_history": rows}).encode())
    survives("a.jsonl", "\n".join(json.dumps(row) for row in rows).encode())


@given(st.lists(st.floats(allow_nan=True), min_size=12, max_size=120), st.lists(st.floats(), min_size=5, max_size=20))
def test_any_numbers_can_be_read(losses: list[float], checks: list[float]) -> None:
    rows = [f"{i},{loss!r},{abs(loss)!r},{checks[i] if i < len(checks) else ''!r}" for i, loss in enumerate(losses)]
    survives("a.csv", "\n".join(["step,loss,grad_norm,val_loss", *rows]).encode())


def survives(name: str, content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            reading = diagnose(open_run(path))
        except ConfigError:
            return
        assert Reading.from_json(reading.to_json()) == reading
        json.dumps(reading.as_dict(), allow_nan=False)


@given(st.integers(1, 2000))
def test_a_log_cut_anywhere_is_a_reading_or_a_message(cut: int) -> None:
    import io

    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["step", "loss", "grad_norm"])
    writer.writerows([i, loss, 1.0] for i, loss in enumerate(LOSSES))
    survives("a.csv", text.getvalue().encode()[:cut])
    history = json.dumps({"log_history": [{"step": i, "loss": loss} for i, loss in enumerate(LOSSES)]})
    survives("trainer_state.json", history.encode()[:cut])
