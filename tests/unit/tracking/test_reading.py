"""The reader of run logs: whatever is in the file, and while it grows."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import steadystep
from steadystep.tracking import Follower, read

HEADER = '{"kind": "start", "steadystep": "0.1", "settings": {"mode": "autopilot"}, "parameters": 7, "time": 3.5}\n'


def row(step: int, loss: float = 1.0, **more: object) -> str:
    return json.dumps({"step": step, "loss": loss, "norm": 0.5, "lr": 0.1, **more}) + "\n"


def write(folder: Path, *parts: str) -> Path:
    (folder / "run.jsonl").write_text("".join(parts))
    return folder


def test_everything_a_log_says(tmp_path: Path) -> None:
    incident = {
        "kind": "incident",
        "step": 1,
        "stepped": False,
        "done": "update skipped",
        "origin": "head",
        "bundle": "incidents/a",
        "restored": 0,
        "diagnosis": {
            "cause": "bad-batch",
            "evidence": "it is high",
            "advice": "look",
            "findings": [
                {"detector": "a", "severity": "warn", "what": "x"},
                {"detector": "b", "severity": "critical", "what": "y"},
            ],
        },
    }
    write(
        tmp_path,
        HEADER,
        row(0, metrics={"kl": 0.25}),
        '{"kind":"layers","step":0,"norms":[1,2.5],"names":["a","b"]}\n',
        row(1, clipped=1, scale=2.0, metrics={"kl": "NaN"}).replace("1.0,", '"-Infinity",', 1),
        '{"kind":"layers","step":1,"norms":["NaN","Infinity"]}\n',
        json.dumps(incident) + "\n",
        '{"kind":"layers","step":2,"norms":[4],"names":["c"]}\n',
        '{"kind": "validation", "step": 2, "metrics": {"val_loss": 2.0, "accuracy": 0.5}}\n',
        '{"kind": "end", "how": "finished"}\n',
    )
    run = read(tmp_path)
    assert (run.name, run.path, run.source) == (tmp_path.name, tmp_path, "steadystep")
    assert run.loss.steps.tolist() == [0, 1]
    assert run.loss.values.tolist() == [1.0, -math.inf]
    assert run.grad_norm.values.tolist() == [0.5, 0.5]
    assert run.lr.values.tolist() == [0.1, 0.1]
    assert run.metrics["kl"].values[0] == 0.25
    assert math.isnan(run.metrics["kl"].values[1])
    assert run.clipped.tolist() == [1]
    assert run.scale.values.tolist() == [2.0]
    assert run.layers is not None
    assert run.layers.names == ("a", "b", "c")
    np.testing.assert_array_equal(
        run.layers.norms, [[1, 2.5, math.nan], [math.nan, math.inf, math.nan], [math.nan, math.nan, 4]]
    )
    assert run.validation["val_loss"].steps.tolist() == [2]
    assert run.validation["accuracy"].values.tolist() == [0.5]
    assert (run.settings, run.parameters, run.began) == ({"mode": "autopilot"}, 7, 3.5)
    assert (run.ended, run.end, run.notes, run.restarts) == (True, "finished", (), ())
    (found,) = run.incidents
    assert (found.step, found.cause, found.severity, found.stepped) == (1, "bad-batch", "critical", False)
    assert (found.evidence, found.advice, found.done, found.origin) == ("it is high", "look", "update skipped", "head")
    assert found.bundle == str(tmp_path / "incidents/a")
    assert found.restored == 0
    assert found.findings == (("a", "warn", "x"), ("b", "critical", "y"))


def test_the_file_itself_is_a_path_too(tmp_path: Path) -> None:
    write(tmp_path, HEADER, row(0))
    assert read(tmp_path / "run.jsonl").path == read(str(tmp_path)).path == tmp_path


def test_after_a_restart_the_later_steps_count(tmp_path: Path) -> None:
    trouble = '{"kind":"incident","step":4,"diagnosis":{"cause":"lost"}}\n'
    write(
        tmp_path,
        HEADER,
        *(row(i, metrics={"kl": 1.0}, clipped=1) for i in range(3)),
        '{"kind": "validation", "step": 3, "metrics": {"val_loss": 3.0}}\n',
        *(row(i, metrics={"kl": 1.0}, clipped=1) for i in range(3, 6)),
        '{"kind":"layers","step":4,"norms":[1],"names":["a"]}\n',
        trouble,
        '{"kind": "validation", "step": 6, "metrics": {"val_loss": 6.0}}\n',
        '{"step":6,"lo\n',
        HEADER,
        *(row(i, 2.0) for i in range(3, 8)),
        HEADER,
        row(8, 3.0),
    )
    run = read(tmp_path)
    assert run.loss.steps.tolist() == list(range(9))
    assert run.loss.values.tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 3]
    assert run.restarts == (3, 8)
    assert run.clipped.tolist() == run.metrics["kl"].steps.tolist() == [0, 1, 2]
    assert run.validation["val_loss"].steps.tolist() == [3]  # the one that the second process started from
    assert (run.layers, run.incidents, run.ended) == (None, (), False)
    assert any("1 line could not be read" in note for note in run.notes)
    assert any("3 steps were repeated" in note for note in run.notes)


def test_a_run_begun_anew_in_the_same_folder_is_the_later_one(tmp_path: Path) -> None:
    run = read(write(tmp_path, HEADER, row(0), row(1), HEADER, row(0, 5.0)))
    assert run.loss.values.tolist() == [5.0]
    assert run.restarts == ()


def test_following_a_log_that_grows_in_pieces(tmp_path: Path) -> None:
    text = HEADER + "".join(row(i) for i in range(50)) + '{"kind": "end", "how": "finished"}\n'
    path = tmp_path / "run.jsonl"
    path.write_text("")
    follower = Follower(tmp_path)
    assert not follower.update()
    assert follower.run.notes == ("the log is empty",)
    for at in range(0, len(text), 37):
        with path.open("a") as file:
            file.write(text[at : at + 37])
        changed = follower.update()
        whole = text[: at + 37].count("\n")
        assert len(follower.run.loss) == max(0, min(50, whole - 1))
        assert changed == ("\n" in text[at : at + 37])
    assert follower.run.ended
    assert not follower.update()
    kept = follower.run
    assert follower.run is kept  # nothing new, nothing made
    assert kept.notes == ()


def test_a_log_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    follower = Follower(write(tmp_path, HEADER, *(row(i) for i in range(10))))
    follower.update()
    write(tmp_path, HEADER, row(0, 7.0))  # shorter
    assert follower.update()
    assert follower.run.loss.values.tolist() == [7.0]
    (tmp_path / "new").write_text(HEADER + "".join(row(i, 8.0) for i in range(9)))
    (tmp_path / "new").replace(tmp_path / "run.jsonl")  # longer, another file
    assert follower.update()
    assert set(follower.run.loss.values) == {8.0}


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\xff\xfe binary \x80\n" * 50,
        b"step,loss\n0,1.0\n1,0.5\n",
        b'{"log_history": [1, 2]}',
        b'{"log_history": [1, 2]}\n',
        b"[" * 100_000 + b"\n",
        b"9" * 10_000 + b"\n",
        b'"text"\nnull\n[1,\n2]\n',
        b'{"kind": ["start"]}\n',
    ],
)
def test_something_else_is_said_to_be_that(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.jsonl").write_bytes(content)
    with pytest.raises(steadystep.ConfigError, match="not a run log"):
        read(tmp_path)


def test_what_is_not_there_or_cannot_be_read_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(steadystep.ConfigError, match="no run log here"):
        read(tmp_path)
    with pytest.raises(steadystep.ConfigError, match="elsewhere"):
        read(tmp_path / "elsewhere")
    (tmp_path / "run.jsonl").mkdir()
    with pytest.raises(steadystep.ConfigError, match="cannot be read"):
        read(tmp_path)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
keys = ["kind", "step", "loss", "norm", "lr", "metrics", "norms", "names", "diagnosis", "settings", "scale"]
kinds = st.sampled_from(["start", "layers", "validation", "incident", "end", "new"])
line = st.dictionaries(st.sampled_from(keys), anything).flatmap(
    lambda made: st.one_of(st.just(made), kinds.map(lambda kind: {**made, "kind": kind}))
)


@given(st.lists(line.map(json.dumps) | st.text(max_size=20).map(lambda s: s.replace("\n", " ")), max_size=12))
def test_any_rubbish_between_good_lines_is_counted_and_leaves_them_alone(tmp_path_factory, rubbish: list[str]) -> None:
    folder = tmp_path_factory.mktemp("run")
    lines = [row(2 * i + 10**15, 3.0) for i in range(len(rubbish) + 1)]
    mixed = "".join(good + bad + "\n" for good, bad in zip(lines, rubbish, strict=False)) + lines[-1]
    (folder / "run.jsonl").write_text(HEADER + mixed, encoding="utf-8", errors="surrogatepass")
    run = read(folder)
    steps = run.loss.steps
    assert (np.diff(steps) > 0).all()
    assert steps[-1] == 2 * len(rubbish) + 10**15
    assert all(isinstance(note, str) for note in run.notes)


@given(st.binary(max_size=400), st.integers(0, 400))
def test_bytes_of_any_kind_give_a_run_or_a_clear_error(tmp_path_factory, noise: bytes, at: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    whole = (HEADER + row(0) + row(1) + row(2)).encode()
    (folder / "run.jsonl").write_bytes(whole[:at] + noise + whole[at:])
    try:
        run = read(folder)
    except steadystep.ConfigError:
        return
    assert len(run.loss) <= 4 + noise.count(b"\n")


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path, HEADER, row(0))
    code = f"import sys; from steadystep.tracking import read; read({str(tmp_path)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_probes_hyperparameters_and_what_was_refused(tmp_path: Path) -> None:
    found = '{"detector":"learning-rate-jump","severity":"act","what":"it jumped","value":0.1}'
    diagnosis = f'{{"cause":"schedule-error","findings":[{found}]}}'
    (tmp_path / "run.jsonl").write_text(
        '{"kind": "start","settings":{},"hparams":{"lr":0.001,"net":{"depth":4}}}\n'
        '{"step":0,"loss":1.0,"norm":1.0,"lr":0.1}\n'
        '{"kind":"probe","step":0,"ratios":[0.001,null],"names":["a","b"],"attentions":["h"],"logits":[7.5]}\n'
        f'{{"kind":"incident","step":0,"plan":{{"lr":0.001,"norm":2.0}},"diagnosis":{diagnosis}}}\n'
        '{"step":1,"loss":1.0,"norm":1.0,"lr":0.1}\n'
        '{"kind":"probe","step":1,"ratios":[0.002,0.5]}\n'
        f'{{"kind":"incident","step":1,"plan":{{}},"diagnosis":{diagnosis}}}\n'
    )
    run = read(tmp_path)
    assert run.notes == ()
    assert run.hparams == {"lr": 0.001, "net": {"depth": 4}}
    assert run.updates is not None
    assert run.logits is not None
    assert run.updates.names == ("a", "b")
    np.testing.assert_allclose(run.updates.norms, [[0.001, np.nan], [0.002, 0.5]])
    assert (run.logits.steps.tolist(), run.logits.names, run.logits.norms.tolist()) == ([0], ("h",), [[7.5]])
    assert [(i.refused_lr, i.scaled_to) for i in run.incidents] == [(0.1, 2.0), (None, None)]
