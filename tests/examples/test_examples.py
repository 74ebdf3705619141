"""Every example by feature tells the story its docstring promises. Those of frameworks run in tests/integrations."""

import ast
import difflib
import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from steadystep.tracking import read
from tests.integrations.test_examples import EXAMPLES, example

ROOT = EXAMPLES.parent
STORIES = re.findall(r"^def test_story_of_(\w+)\(", Path(__file__).read_text(), re.M)
BASE = (EXAMPLES / "base_loop.py").read_text().splitlines()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, **settings: Any) -> Any:
    return example(name).main(**settings)


def test_story_of_base_loop(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "base_loop.py"), run_name="__main__")
    said = re.fullmatch(r"held-out error (\S+) after 160 updates\n", capsys.readouterr().out)
    assert said is not None
    assert 0.0 < float(said[1]) < 0.5


def test_story_of_guard() -> None:
    refused, error = run("guard")
    assert [cause for _, cause in refused] == ["non-finite-input"] * 5
    assert len({step // 32 for step, _ in refused}) == 5  # once in each epoch
    assert error < 0.5


def test_story_of_accumulation() -> None:
    assert run("accumulation") == (40, 5)


def test_story_of_mixed_precision() -> None:
    told = run("mixed_precision")
    assert told.bad_losses == 5
    assert told.scale == 65536.0 / 2**told.overflows  # only overflows moved it
    assert told.steps == 160 - 5 - told.overflows


def test_story_of_clipping() -> None:
    clipped, largest = run("clipping")
    assert 0 < clipped < 160
    assert largest > 1.0


def test_story_of_schedule() -> None:
    rates = run("schedule")
    schedule = example("schedule")
    planned = schedule.then(schedule.warmup(20), 20, schedule.cosine(140, floor=0.1))
    assert rates[:21] == pytest.approx([1e-2 * planned(step) for step in range(21)])
    assert rates[-1] == pytest.approx(1e-2 * planned(154))  # the 155th update at the 160th attempt


def test_story_of_checkpoint_resume() -> None:
    assert run("checkpoint_resume") == ([160, 70, 90], True)


def test_story_of_early_stopping() -> None:
    epochs, error = run("early_stopping")
    assert 3 < epochs < 200
    assert error < 1.5


def test_story_of_validation_and_best() -> None:
    validations, error = run("validation_and_best")
    assert len(validations) == 5
    assert min(validations) < validations[-1]
    assert error == pytest.approx(min(validations))


def test_story_of_nan_forensics(capsys: pytest.CaptureFixture[str]) -> None:
    origin, again = run("nan_forensics")
    assert origin.startswith("0 (UnitLength), forward")
    assert again
    bundle = Path(re.search(r"steadystep replay (\S+)", capsys.readouterr().out)[1])
    assert json.loads((bundle / "incident.json").read_text())


def test_story_of_fault_injection() -> None:
    verdicts = {row.label: row.verdict for row in run("fault_injection").rows}
    assert verdicts.pop("bit-flip") in ("saved", "limited")
    harmless = {label for label in verdicts if label.startswith("bit-flip ")}  # one bit of a mantissa, one product
    assert {verdicts.pop(label) for label in harmless} == {"harmless"}
    assert len(verdicts) == 3
    assert set(verdicts.values()) == {"saved"}


def test_story_of_your_own_detector() -> None:
    assert 0 < len(run("your_own_detector")) < 32


def test_story_of_your_own_sink() -> None:
    diary = run("your_own_sink")
    assert len(diary.losses) == 32
    assert [line.split(": ")[1] for line in diary.incidents] == ["non-finite-input, update skipped"]


def test_story_of_tracking_tensorboard() -> None:
    pytest.importorskip("tensorboard")
    files = run("tracking_tensorboard")
    written = b"".join(path.read_bytes() for path in files)
    assert b"Loss/train" in written
    assert b"Incidents/non-finite-input" in written
    assert len(read("runs/tensorboard_example").validation["val_loss"]) == 5


def test_story_of_layerwise_lr(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(set(run("layerwise_lr"))) == [0.00125, 0.0025, 0.005, 0.01]
    assert "no decay" in capsys.readouterr().out


def test_story_of_initialisation() -> None:
    assert run("initialisation") == (["init-vanishing"], True)


def test_story_of_find_lr() -> None:
    suggested, error = run("find_lr")
    assert 1e-3 < suggested < 1e-1
    assert error < 1.0  # at the guess of 1e-5 it stays above 2


def test_story_of_observe_only() -> None:
    step, error = run("observe_only")
    assert 0 <= step < 32
    assert math.isnan(error)


def test_story_of_out_of_memory() -> None:
    with pytest.warns(UserWarning, match="in 2 parts"):
        sizes, error = run("out_of_memory")
    assert sizes == [32, 32, 16, 16, 16, 16]
    assert error == pytest.approx(run("base_loop"), rel=0.05)


@pytest.mark.parametrize(("lr", "noticed"), [(10.0, ["entropy-collapse"]), (0.03, [])])
def test_story_of_rl_metrics(lr: float, noticed: list[str]) -> None:
    assert run("rl_metrics", lr=lr) == noticed


def test_story_of_config_yaml() -> None:
    updates, lr, said = run("config_yaml")
    assert updates == 80
    assert 1e-4 <= lr < 1.1e-4
    assert "did you mean 'training.max_grad_norm'" in said


def test_every_example_is_run_by_a_test() -> None:
    others = [
        *ROOT.glob("tests/integrations/*.py"),
        *ROOT.glob("tests/distributed/*.py"),
        *ROOT.glob("tests/engines/*.py"),
    ]
    elsewhere = "\n".join(path.read_text() for path in others)
    for path in EXAMPLES.glob("*.py"):
        assert path.stem in STORIES or re.search(rf"\b{path.stem}(\.py)?\"", elsewhere), path.name


@pytest.mark.parametrize("name", STORIES)
def test_an_example_is_short_and_close_to_the_base_loop(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    lines, tree = text.splitlines(), ast.parse(text)
    assert len(lines) < 60
    assert f"Run it: `python examples/{name}.py`. Look at" in (ast.get_docstring(tree) or "")
    assert lines[-2:] == ['if __name__ == "__main__":', "    main()"]
    kept = sum(block.size for block in difflib.SequenceMatcher(a=BASE, b=lines, autojunk=False).get_matching_blocks())
    assert len(lines) - kept <= 40  # a class of your own is thirty of them; the others have under thirty


def test_the_page_lists_every_example_and_its_diffs_are_real() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(re.findall(r"\]\(\.\./examples/(\w+)\.py\)", page))
    diffs = re.findall(r"^## `(\w+)\.py`.*?^```diff\n(.*?)^```", page, re.M | re.S)
    assert len(diffs) >= 3
    for name, diff in diffs:
        example_lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
        for line in diff.splitlines():
            if line[:1] in ("+", " "):
                assert line[1:] in example_lines, f"{name}: {line}"
            if line[:1] in ("-", " "):
                assert line[1:] in BASE, f"{name}: {line}"
