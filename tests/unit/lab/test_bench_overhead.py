"""The overhead study: its arithmetic, its counting and its table. No clock is judged here."""

import io

import pytest
import torch
from rich.console import Console

from steadystep.lab.bench import overhead
from steadystep.lab.bench.overhead import STUDY, summary, table
from steadystep.lab.bench.overhead_steps import (
    MODELS,
    bytes_within,
    fresh,
    guarded_step,
    mlp,
    plain_step,
    reads_per_step,
)
from steadystep.lab.bench.study import Choice


def test_a_ratio_is_the_candidate_over_its_two_plain_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {"a": 1.0, "b": 3.0, "mine": 4.0}
    order: list[str] = []

    def seconds(step, repeats: int) -> float:
        order.append(step)
        return cost[step] * repeats

    monkeypatch.setattr(overhead, "seconds", seconds)
    assert overhead.ratios("a", "mine", "b", blocks=2, repeats=7) == [2.0, 2.0]
    assert order == ["a", "mine", "b"] * 2  # interleaved


def test_host_reads_and_bytes(tmp_path) -> None:
    setup = mlp(8)
    plain = plain_step(setup)
    assert reads_per_step(plain, repeats=3) == 1.0  # loss.item(); what AdamW reads by itself does not count
    weights = sum(p.numel() * 4 for p in setup[0].parameters())
    batch, counts = 32 * 8 * 4, 4 * len(list(setup[0].parameters()))
    assert bytes_within(plain) == 3 * weights + batch + counts  # weights, two moments; step counts; the batch
    guarded = guarded_step(mlp(8), tmp_path)
    for _ in range(3):
        guarded()
    assert reads_per_step(guarded, repeats=3) == 1.0
    assert bytes_within(guarded) - bytes_within(plain) >= 3 * weights  # one state is remembered by now


def test_reads_are_counted_no_longer_afterwards() -> None:
    before = torch.Tensor.item
    with pytest.raises(ZeroDivisionError):
        reads_per_step(lambda: 1 / 0)
    assert torch.Tensor.item is before


def test_the_same_weights_every_time() -> None:
    first, second = fresh("MLP, width 64"), fresh("MLP, width 64")
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True))


def test_jobs_table_and_figure(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = STUDY.jobs(Choice())
    assert [job.args["model"] for job in jobs] == list(MODELS)
    assert len(STUDY.jobs(Choice(quick=True))) == 1
    assert STUDY.alone
    measured = {"parameters": 1000, "tensors": 8, "ratio": 0.987, "low": 0.9, "high": 1.1, "noise": 1.002}
    measured |= {"noise_low": 0.95, "noise_high": 1.05, "plain_us": 1234.0, "reads": 1.0, "plain_reads": 1.0}
    rows = [dict(jobs[0].args) | measured | {"beyond_plain_bytes": 36_000, "threads": 1}]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(rows))
    text = console.export_text()
    assert "0.987" in text
    assert "36.0 B / parameter" in text
    assert summary(rows)["models"][0]["ratio"] == 0.987
    pytest.importorskip("matplotlib")
    assert STUDY.figure is not None
    STUDY.figure(rows, tmp_path / "overhead.png")
    assert (tmp_path / "overhead.png").stat().st_size > 3000
