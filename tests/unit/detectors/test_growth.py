"""Embedding rows and attention logits that grow without end: noticed in time, told once, and silence otherwise."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import steadystep
from steadystep.detectors import AttentionLogitGrowth, Detector, EmbeddingGrowth
from steadystep.diagnosis import ADVICE, Cause, RunHistory, explain
from steadystep.lab.tasks.text import TopicsText
from steadystep.layers import BoundedEmbedding, StableAttention
from steadystep.records import Diagnosis, Finding, Probe, Signals

BOTH: dict[type, tuple[str, str, float]] = {
    EmbeddingGrowth: ("tables", "row_norms", 64.0),
    AttentionLogitGrowth: ("attentions", "logit_bounds", 128.0),
}
each = pytest.mark.parametrize("make", BOTH)


def stream(make: type, *sizes: Sequence[float]) -> list[Signals]:
    """One probe after the other; each of `sizes` is what one name shows over time."""
    names, values, _ = BOTH[make]
    found = []
    for i, row in enumerate(zip(*sizes, strict=True)):
        fields: dict[str, Any] = {names: tuple("abc"[: len(row)]), values: tuple(row)}
        found.append(Signals(step=10 * i + 1, loss=1.0, grad_norm=1.0, probe=Probe(step=10 * i, **fields)))
    return found


def run(detector: Detector, signals: Sequence[Signals]) -> list[Finding]:
    return [finding for one in signals for finding in detector.update(one)]


@each
def test_growth_is_told_once_after_three_probes(make: type) -> None:
    floor = BOTH[make][2]
    growing = [1.0, 2.0, 3.0, 4.0, *(floor * 1.1**i for i in range(1, 9))]
    (found,) = run(make(), stream(make, growing))
    assert (found.severity, found.where, found.step) == ("warn", ("a",), 61)
    assert (found.value, found.limit, found.baseline) == (growing[6], floor, 3.0)
    assert f"{growing[6]:.3g}" in found.what
    assert run(make(), stream(make, growing[:6])) == []


@each
def test_each_name_is_told_and_the_worst_is_the_value(make: type) -> None:
    floor = BOTH[make][2]
    slow = [1.0] * 4 + [floor * 1.1**i for i in range(1, 6)]
    fast = [1.0] * 4 + [floor * 2.0**i for i in range(1, 6)]
    late = [1.0] * 6 + [floor * 3.0**i for i in range(1, 4)]
    together, alone = run(make(), stream(make, slow, fast, late))
    assert (together.where, together.value) == (("a", "b"), fast[6])
    assert (alone.where, alone.value) == (("c",), late[8])


@each
@pytest.mark.parametrize(
    "sizes",
    [
        [1.0] * 20,
        [0.01] * 4 + [0.9 * 1.001**i for i in range(20)],
        [1.0, 1.0, 1.0, 1.0, 9.0, 9.0] + [9.0 - 0.01 * i for i in range(20)],
        [5.0] * 4 + [5.0 * 1.05**i for i in range(28)],
        [1.0] * 4 + [2.0, 2.1, 0.5] * 8,
        [1.0] * 4 + [2.0, 3.0, 2.5, 2.4] * 6,
        [1.0] * 4 + [math.nan, math.inf] * 9,
    ],
    ids=[
        "steady",
        "grown, but small",
        "grown, and no longer growing",
        "large from the start",
        "not lasting",
        "up and down",
        "not finite",
    ],
)
def test_silence(make: type, sizes: list[float]) -> None:
    """In multiples of the floor, so that the numbers are the same for both."""
    floor = BOTH[make][2]
    assert run(make(), stream(make, [floor * size for size in sizes])) == []


@each
def test_what_is_not_finite_neither_counts_nor_breaks_the_row(make: type) -> None:
    floor = BOTH[make][2]
    growing = [math.nan, 1.0, math.inf, 2.0, 3.0, 4.0, 2 * floor, math.nan, 3 * floor, -math.inf, 4 * floor]
    (found,) = run(make(), stream(make, growing))
    assert (found.step, found.baseline) == (101, 3.0)


@each
def test_a_beginning_of_nothing_is_no_excuse(make: type) -> None:
    floor = BOTH[make][2]
    assert run(make(), stream(make, [0.0] * 4 + [floor * i for i in (2.0, 3.0, 4.0)]))


jumps = st.sampled_from([0.0, 0.5, 1.0, 1.2, 2.0, 4.0, math.nan, math.inf])


@each
@given(st.lists(st.tuples(jumps, jumps), max_size=30), st.integers(0, 30))
def test_resume_is_invisible_while_it_grows(make: type, steps: list[tuple[float, float]], cut: int) -> None:
    sizes: list[list[float]] = [[1.0], [50.0]]
    for jump in steps:
        for column, factor in zip(sizes, jump, strict=True):
            last = column[-1] if math.isfinite(column[-1]) else 10.0
            column.append(last * factor)
    signals = stream(make, *sizes)
    whole, first, second = make(), make(), make()
    expected = run(whole, signals)
    got = run(first, signals[:cut])
    run(second, signals[: cut // 2])  # a used one
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    got += run(second, signals[cut:])
    assert repr(got) == repr(expected)
    assert second.state_dict() == whole.state_dict()
    assert all(finding.severity == "warn" and finding.value > finding.limit for finding in got)


@each
@pytest.mark.parametrize("cut", range(9))
def test_a_row_of_concerns_is_not_begun_again_after_a_resume(make: type, cut: int) -> None:
    signals = stream(make, [1.0] * 4 + [BOTH[make][2] * i for i in range(2, 7)])
    first, second = make(), make()
    got = run(first, signals[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += run(second, signals[cut:])
    assert [finding.step for finding in got] == [61]


# Causes


def warning(detector: str) -> Finding:
    return Finding(detector=detector, step=300, severity="warn", value=1.0, limit=0.5, what="it grows", where=("a",))


def causes(*detectors: str) -> list[str]:
    run_history = RunHistory()
    for step in range(300):
        run_history.note(Signals(step=step, loss=2.0 / (1 + step / 20), grad_norm=1.0), Diagnosis(), stepped=True)
    signals = Signals(step=300, loss=0.12, grad_norm=1.0)
    run_history.note(signals, explain(signals, tuple(map(warning, detectors))), stepped=True)
    return [diagnosis.cause for diagnosis in run_history.diagnose()]


def test_each_is_a_cause_with_the_tools_that_help() -> None:
    assert causes("embedding-growth") == ["embedding-growth"]
    assert causes("attention-logit-growth") == ["attention-logit-growth"]
    assert "BoundedEmbedding" in ADVICE[Cause.EMBEDDING_GROWTH]
    for tool in ("StableAttention", "qk_norm", "logit_cap", "qk_clip_", "z_loss"):
        assert tool in ADVICE[Cause.ATTENTION_LOGIT_GROWTH]


def test_what_makes_them_grow_comes_first() -> None:
    assert causes("attention-logit-growth", "embedding-growth") == ["embedding-growth", "attention-logit-growth"]
    # gradients that grow are no fault of a run that halves its loss
    assert causes("attention-logit-growth", "growing-gradient") == ["attention-logit-growth"]


@pytest.mark.parametrize("detector", ["embedding-growth", "attention-logit-growth"])
def test_the_overflow_they_end_in_comes_after_them(detector: str) -> None:
    run_history = RunHistory()
    for step in range(100):
        signals = Signals(step=step, loss=math.nan if step > 90 else 1.0, grad_norm=1.0)
        found = (Finding(detector="non-finite", step=step, severity="critical", value=math.nan, limit=0.0),)
        run_history.note(signals, explain(signals, found if step > 90 else ()), stepped=step <= 90)
    run_history.note(signals, Diagnosis(findings=(warning(detector),)), stepped=False)
    assert [d.cause for d in run_history.diagnose()][:2] == [detector, "non-finite-loss"]


# Real runs


class Block(nn.Module):
    """Attention and an MLP behind norms, added to the stream."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        theirs = isinstance(self.attention, nn.MultiheadAttention)
        mask = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
        mixed = self.attention(y, y, y, attn_mask=mask, need_weights=False)[0] if theirs else self.attention(y)
        out: Tensor = x + mixed
        return out + self.mlp(self.norms[1](out))


class LittleGPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, attention: Callable[[], nn.Module], table: nn.Embedding) -> None:
        super().__init__()
        self.tokens = table
        self.positions = nn.Parameter(0.02 * torch.randn(16, 32))
        self.blocks = nn.Sequential(*(Block(attention()) for _ in range(2)))
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 256))

    def loss(self, text: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.tokens(text[:, :-1]) + self.positions))
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: StableAttention(32, 2, causal=True, qk_norm=False),
    "torch's": lambda: nn.MultiheadAttention(32, 2, batch_first=True),
}


def train(
    attention: Callable[[], nn.Module],
    *,
    lr: float,
    steps: int = 68,
    table: type[nn.Embedding] = nn.Embedding,
    creep: float = 1.0,
) -> tuple[list[Finding], steadystep.Guard]:
    """AdamW on English; `creep` multiplies the learning rate of the table at every step."""
    torch.manual_seed(0)
    model = LittleGPT(attention, table(256, 32))
    rest = [p for name, p in model.named_parameters() if not name.startswith("tokens")]
    tables = {"params": [model.tokens.weight], "lr": lr if creep == 1.0 else 1.0}
    optimizer = torch.optim.AdamW([{"params": rest}, tables], lr=lr, weight_decay=0.0)
    guard = steadystep.Guard(model, optimizer, config={"mode": "observe"})
    text = TopicsText(context=16, batch_size=4, seed=0)
    found: list[Finding] = []
    for _ in range(steps):
        optimizer.param_groups[1]["lr"] *= creep
        outcome = guard.step(model.loss, batch=text.batch())
        found += [f for f in outcome.findings if f.detector.endswith("-growth")]
    return found, guard


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_learning_rate_too_high_makes_logits_grow(name: str) -> None:
    found, guard = train(ATTENTIONS[name], lr=0.1)
    assert {f.detector for f in found} == {"attention-logit-growth"}
    where = [place for f in found for place in f.where]
    assert where
    assert set(where) <= {"blocks.0.attention", "blocks.1.attention"}
    assert len(where) == len(set(where)), "each once"
    assert all(f.severity == "warn" and f.step <= 65 and f.value > 4 * f.baseline for f in found)
    (mine,) = [d for d in guard.diagnose() if d.cause == "attention-logit-growth"]
    assert where[0] in mine.evidence


def test_the_cures_cure() -> None:
    for more in ({}, {"qk_norm": False, "logit_cap": 50.0}):
        found, _ = train(lambda more=more: StableAttention(32, 2, causal=True, **more), lr=0.1)
        assert found == []


def test_a_table_that_runs_away_is_told_and_a_bounded_one_does_not() -> None:
    found, guard = train(ATTENTIONS["ours"], lr=1e-3, creep=1.06, steps=130)
    (finding,) = [f for f in found if f.detector == "embedding-growth"]
    assert (finding.where, finding.severity) == (("tokens",), "warn")
    assert finding.value > 64.0
    assert "embedding-growth" in [d.cause for d in guard.diagnose()]
    found, _ = train(ATTENTIONS["ours"], lr=1e-3, creep=1.06, steps=130, table=BoundedEmbedding)
    assert "embedding-growth" not in [f.detector for f in found]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_healthy_run_is_quiet(name: str) -> None:
    found, guard = train(ATTENTIONS[name], lr=3e-3, steps=130)
    assert found == []
    assert [d.cause for d in guard.diagnose()] == ["healthy"]
