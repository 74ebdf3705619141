"""`bench precision`: what the table says, and that fp16 without a scale really rounds gradients to zero."""

import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from steadystep.lab.bench import Choice, Row, StudyJob, precision
from steadystep.lab.bench.precision import FORMATS, SETTINGS, STUDY, PrecisionTraining, figure, summary, table
from steadystep.precision import underflow_share


def row(setting: str, name: str, seed: int, held_out: float) -> Row:
    return {
        "what": "training",
        "setting": setting,
        "format": name,
        "seed": seed,
        "num_steps": 3,
        "held_out": held_out,
        "overflows": 1,
        "underflow": 0.25,
        "saved_bytes": 2048,
    }


ROWS = [
    row("loss", "fp32", 1, 2.0),
    row("loss", "fp32", 2, 3.0),
    row("loss", "bf16", 1, 2.1),
    row("loss", "bf16", 2, 3.25),
    row("loss / 4096", "fp32", 1, 2.0),
    row("loss / 4096", "fp16, no scaling", 1, math.nan),
    {"what": "speed", "times_fp32": dict.fromkeys(FORMATS, 2.0)},
]


def test_formats_are_compared_with_fp32_of_the_same_seed() -> None:
    fp32, bf16, _, lost = summary(ROWS)["lines"]
    assert (fp32["worse_than_fp32"], fp32["failed"]) == (0.0, 0)
    assert bf16["worse_than_fp32"] == pytest.approx(0.175)
    assert (bf16["failed"], bf16["runs"], bf16["times_fp32"]) == (1, 2, 2.0)
    assert (lost["failed"], lost["setting"]) == (1, "loss / 4096")


def test_every_setting_and_format_has_every_seed_and_speed_is_measured_once() -> None:
    jobs = STUDY.jobs(Choice())
    trained = [job for job in jobs if job.args["what"] == "training"]
    assert len(trained) == len(SETTINGS) * len(FORMATS) * 3
    assert len(jobs) == len(trained) + 1


def test_the_table_fits_a_terminal_and_says_what_a_cpu_cannot_show() -> None:
    for rows in (ROWS, ROWS[:1]):
        console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(table(rows))
        text = " ".join(console.export_text().split())
        console.file.close()
        assert "…" not in text
        assert "on a GPU with tensor cores it is faster" in text


def test_the_figure_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure(ROWS, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


def zeros(name: str, divisor: float) -> float:
    training = PrecisionTraining(name, divisor=divisor, seed=0)
    for _ in range(2):
        assert training.backward(training.text.batch())
        training.update(finite=True)
    training.backward(training.text.batch())
    return float(underflow_share(training.grads()))


def test_small_gradients_are_lost_in_fp16_and_a_scale_saves_them() -> None:
    lost = zeros("fp16, no scaling", 2.0**20)
    assert lost > 0.5
    assert zeros("fp16 + scaling", 2.0**20) < 0.1 * lost
    assert zeros("bf16", 2.0**20) < 0.01


def test_the_divisor_alone_changes_nothing_but_the_size_of_gradients() -> None:
    one, small = (PrecisionTraining("fp32", divisor=divisor, seed=3) for divisor in (1.0, 4096.0))
    one.backward(one.text.batch())
    small.backward(small.text.batch())
    for a, b in zip(one.grads(), small.grads(), strict=True):
        assert torch.equal(a, b * 4096)  # a power of two


def test_unscaled_gradients_are_those_of_the_loss_itself() -> None:
    plain, scaled = (
        PrecisionTraining("fp32", divisor=1.0, seed=1),
        PrecisionTraining("fp16 + scaling", divisor=1.0, seed=1),
    )
    plain.backward(plain.text.batch())
    scaled.backward(scaled.text.batch())
    a, b = (torch.nn.utils.get_total_norm(training.grads()).item() for training in (plain, scaled))
    assert b == pytest.approx(a, rel=0.01)


def test_an_overflow_is_refused_with_a_scale_and_taken_without() -> None:
    for name, kept in (("fp16 + scaling", True), ("fp16, no scaling", False)):
        training = PrecisionTraining(name, divisor=1e-9, seed=0)
        before = [p.detach().clone() for p in training.model.parameters()]
        finite = training.backward(training.text.batch())
        assert not finite
        training.update(finite=finite)
        same = all(torch.equal(p, q) for p, q in zip(training.model.parameters(), before, strict=True))
        assert same == kept


def test_a_short_run_of_each_kind() -> None:
    fp32, half = (
        STUDY.run(
            StudyJob(key="", args={"what": "training", "setting": "loss", "format": f, "seed": 0, "num_steps": 2})
        )
        for f in ("fp32", "bf16")
    )
    assert half["saved_bytes"] < 0.8 * fp32["saved_bytes"]
    assert half["held_out"] == pytest.approx(fp32["held_out"], abs=0.01)
    told = precision.speed(num_rounds=1, num_steps=1)
    assert told["fp32"] == 1.0
    assert told.keys() == FORMATS.keys()
