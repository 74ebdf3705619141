"""`check` on our own files: a YAML config and a run's folder."""

from pathlib import Path

import pytest

from steadystep.errors import ConfigError
from steadystep.lint import ChecklistItem, Report, check_path
from steadystep.lint.configs import check_config
from steadystep.lint.runs import check_run


def config(tmp_path: Path, text: str) -> Report:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return check_config(path)


def items(report: Report) -> dict[str, ChecklistItem]:
    return {item.name: item for item in report.items}


def test_a_good_config_is_a_list_with_lines(tmp_path: Path) -> None:
    text = (
        "training:\n  max_grad_norm: 1.0\n  lr_scheduler: cosine\n  warmup_steps: 0.1\n  mixed_precision: bf16\n"
        "monitoring:\n  save_checkpoints: true\n"
    )
    report = config(tmp_path, text)
    assert not report.hits
    assert {item.state for item in report.items} == {"present"}
    lines = {name: item.line for name, item in items(report).items()}
    assert lines["gradient clipping"] == 2
    assert lines["learning-rate schedule"] == 3
    assert lines["warm-up"] == 4
    assert lines["mixed precision"] == 5


def test_an_empty_config_shows_what_is_missing_and_how_to_add_it(tmp_path: Path) -> None:
    found = items(config(tmp_path, ""))
    assert found["warm-up"].state == "absent"
    assert "warmup_steps" in found["warm-up"].fix
    assert found["NaN check"].state == "present"
    assert found["checkpoints"].state == "partial"
    assert items(config(tmp_path, "mode: observe"))["NaN check"].state == "partial"
    short = items(config(tmp_path, "training: {warmup_steps: 20, lr_scheduler: cosine}"))["warm-up"]
    assert short.state == "partial"
    assert "20 steps" in short.evidence
    assert items(config(tmp_path, "training: {learning_rate: 30.0}"))["learning rate"].state == "partial"
    assert items(config(tmp_path, "training: {gradient_clipping: false}"))["gradient clipping"].state == "partial"


def test_a_wrong_key_has_its_line_and_the_nearest(tmp_path: Path) -> None:
    report = config(tmp_path, "training:\n  max_grad_norm: 1.0\n  warmup_step: 3\nmonitoring:\n  log_frequency: 0\n")
    assert [(hit.code, hit.line) for hit in report.faults] == [("SS001", 3)]
    assert "did you mean 'training.warmup_steps'?" in report.hits[0].message
    report = config(tmp_path, "task: gpt\ntraining:\n  max_grad_norm: -1\n  patience: 0\n")
    assert [hit.line for hit in report.hits] == [3, 4]


def test_a_run_plan_has_a_seed_and_checkpoints(tmp_path: Path) -> None:
    found = items(config(tmp_path, "task: gpt\nseed: 3\n"))
    assert found["seed"].line == 2
    assert found["checkpoints"].state == "present"


def test_what_is_not_yaml_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.yaml:1"):
        config(tmp_path, "training: [")


def log(folder: Path, rows: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.jsonl").write_text("\n".join(['{"kind": "start", "steadystep": "0"}', *rows]) + "\n")
    return folder


def test_a_healthy_run(tmp_path: Path) -> None:
    rows = []
    for step in range(200):
        lr = 1e-3 * min((step + 1) / 50, 1.0) * (1.0 if step < 100 else 0.5)
        clipped = ',"clipped":true' if step % 40 == 0 else ""
        rows.append(f'{{"step":{step},"loss":{2 / (step + 1):.5f},"norm":0.5,"lr":{lr:.9g}{clipped}}}')
    rows.append('{"kind": "validation", "step": 200, "metrics": {"val_loss": 0.25}}')
    folder = log(tmp_path / "run", rows)
    (folder / "checkpoints" / "step-000100").mkdir(parents=True)
    report = next(check_path(folder))
    assert report.kind == "run"
    found = items(report)
    assert found["gradient clipping"].evidence == "clipped 2.5 % of the steps"
    assert found["warm-up"].state == "present"
    assert "until step 49" in found["warm-up"].evidence
    assert found["learning-rate schedule"].state == "present"
    assert found["NaN check"].state == "present"
    assert "step-000100" in found["checkpoints"].evidence
    assert "0.25 at step 200" in found["validation"].evidence


def test_a_poor_run(tmp_path: Path) -> None:
    rows = [f'{{"step":{s},"loss":1.0,"norm":3.0,"lr":0.001,"clipped":true}}' for s in range(60)]
    rows.append('{"step":60,"loss":"NaN","norm":"NaN","lr":0.001}')
    found = items(check_run(log(tmp_path / "run", rows)))
    assert found["gradient clipping"].state == "partial"
    assert found["warm-up"].state == "absent"
    assert found["learning-rate schedule"].state == "absent"
    assert found["NaN check"].state == "partial"
    assert "first at step 60" in found["NaN check"].evidence
    assert found["checkpoints"].state == "absent"
    assert found["validation"].state == "absent"


def test_an_empty_log_and_no_log(tmp_path: Path) -> None:
    assert [item.state for item in check_run(log(tmp_path / "run", [])).items] == ["absent"]
    with pytest.raises(ConfigError, match="no run log"):
        check_run(tmp_path)
