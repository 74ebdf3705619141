"""Single layers as probes see them: where exactly growth, dead units and updates are worth a word."""

import math

from steadystep.detectors import AttentionLogitGrowth, DeadUnits, EmbeddingGrowth, UpdateRatio
from steadystep.detectors.layers import TensorHistory
from steadystep.records import Finding, Probe
from tests.unit.detectors.feeding import fed, row


class TestTensorHistory:
    def test_the_median_of_the_last_eight_once_there_are_four(self) -> None:
        history = TensorHistory()
        for value in (1.0, math.nan, 2.0, math.inf, 3.0):
            history.learn("a", value)
        assert math.isnan(history.median("a"))
        assert history.last("a") == 3.0
        history.learn("a", 4.0)
        assert history.median("a") == 3.0
        for _ in range(8):
            history.learn("a", 9.0)
        assert history.median("a") == 9.0
        assert math.isnan(history.median("b"))
        assert math.isnan(history.last("b"))

    def test_forgotten_is_unknown(self) -> None:
        history = TensorHistory(2, armed_after=1)
        history.learn("a", 1.0)
        history.forget("a")
        history.forget("b")
        assert math.isnan(history.last("a"))
        history.learn("a", 5.0)
        other = TensorHistory(2, armed_after=1)
        other.load_state_dict(history.state_dict())
        assert (other.median("a"), other.last("a")) == (5.0, 5.0)


def table(*sizes: float, name: str = "wte") -> list[Finding]:
    probes = [Probe(step=i, tables=(name, "other"), row_norms=(size, 1.0)) for i, size in enumerate(sizes)]
    return fed(EmbeddingGrowth, [row(0), *(row(i, probe=probe) for i, probe in enumerate(probes))])


def logits(*sizes: float) -> list[Finding]:
    probes = [Probe(step=i, attentions=("attn",), logit_bounds=(size,)) for i, size in enumerate(sizes)]
    return fed(AttentionLogitGrowth, [row(i, probe=probe) for i, probe in enumerate(probes)])


class TestGrowth:
    def test_three_probes_beyond_four_times_the_beginning(self) -> None:
        (found,) = table(*[20.0] * 4, 81.0, 82.0, 83.0, 84.0, 99.0)
        assert (found.step, found.severity, found.value, found.limit) == (6, "warn", 83.0, 80.0)
        assert (found.baseline, found.where) == (20.0, ("wte",))
        assert table(*[20.0] * 4, 80.0, 80.0, 80.0) == []
        assert table(*[20.0] * 4, 81.0, 82.0, 79.0, 83.0, 84.0) == []

    def test_the_floors(self) -> None:
        assert table(*[1.0] * 4, 60.0, 62.0, 64.0) == []
        assert [f.limit for f in table(*[1.0] * 4, 64.1, 64.2, 64.3)] == [64.0]
        assert logits(*[1.0] * 4, 126.0, 127.0, 128.0) == []
        assert [f.limit for f in logits(*[1.0] * 4, 128.1, 128.2, 128.3)] == [128.0]

    def test_only_while_it_still_rises(self) -> None:
        """Above the median of its last four."""
        assert table(*[1.0] * 4, 100.0, 100.0, 100.0) == []
        assert table(*[1.0] * 4, 100.0, 100.0, 101.0) != []
        assert table(*[1.0] * 4, *[300.0, 200.0, 100.0] * 3) == []

    def test_the_beginning_is_the_median_of_four(self) -> None:
        assert [f.baseline for f in table(900.0, 20.0, 30.0, 1.0, 121.0, 122.0, 123.0)] == [30.0]
        assert [f.step for f in table(math.nan, *[20.0] * 4, 81.0, math.inf, 82.0, 83.0)] == [8]

    def test_the_largest_of_several_is_told(self) -> None:
        rows_ = [(1.0, 1.0)] * 4 + [(70.0 + i, 90.0 + i) for i in range(3)]
        probes = [Probe(step=i, tables=("a", "b"), row_norms=sizes) for i, sizes in enumerate(rows_)]
        (found,) = fed(EmbeddingGrowth, [row(i, probe=probe) for i, probe in enumerate(probes)])
        assert (found.value, found.where) == (92.0, ("a", "b"))


def dead(*shares: float, start: int = 5) -> list[Finding]:
    probes = [Probe(step=start + i, modules=("a", "b"), dead=(share, 0.1)) for i, share in enumerate(shares)]
    return fed(DeadUnits, [row(probe.step, probe=probe) for probe in probes])


def test_dead_units() -> None:
    found = dead(*[0.8] * 6)
    assert [(f.step, f.severity, f.value, f.limit, f.where) for f in found] == [(7, "warn", 0.8, 0.7, ("a",))]
    assert dead(0.8, 0.8, 0.7, 0.8, 0.8) == []
    assert dead(*[0.8] * 3, start=4) == []


def updates(*ratios: float, lr: float = 0.1, start: int = 65) -> list[Finding]:
    """Updates of three tensors with weights of 2; the lower of the medians is the one given."""
    stream = []
    for i, ratio in enumerate(ratios):
        probe = Probe(
            step=start + i, names=("a", "b", "c"), update_rms=(2 * ratio, 1e9, 0.0), weight_rms=(2.0, 2.0, 2.0)
        )
        stream.append(row(start + i, probe=probe, lr=lr))
    return fed(UpdateRatio, stream)


class TestUpdateRatio:
    def test_too_large_for_three_probes_once_until_it_comes_back(self) -> None:
        found = updates(0.2, 0.2, 0.2, 0.2, 0.1, 0.2, 0.2, 0.2)
        assert [(f.step, f.severity, f.value, f.limit) for f in found] == [
            (67, "info", 0.2, 0.1),
            (72, "info", 0.2, 0.1),
        ]
        assert updates(0.2, 0.2, 0.1, 0.2, 0.2) == []

    def test_too_small(self) -> None:
        found = updates(1e-7, 1e-7, 1e-7, 1e-7)
        assert [(f.step, f.limit) for f in found] == [(67, 1e-6)]
        assert updates(*[1e-6] * 4) == []
        for lr in (0.0, math.inf, math.nan):
            assert updates(*[1e-7] * 4, lr=lr) == []

    def test_the_first_64_steps_do_not_count(self) -> None:
        assert updates(0.2, 0.2, 0.2, start=64) == []

    def test_tensors_that_have_not_begun_or_are_not_finite_do_not_count(self) -> None:
        sizes = (2e-8, 1e-8, 1e-8, math.inf, 1.0)
        moved = (1e-8, 1e9, 1e9, 1e9, math.inf)
        probes = [Probe(step=70 + i, names=tuple("abcde"), update_rms=moved, weight_rms=sizes) for i in range(3)]
        (found,) = fed(UpdateRatio, [row(probe.step, probe=probe) for probe in probes])
        assert found.value == 0.5
        nothing = [Probe(step=70 + i, names=("a",), update_rms=(1.0,), weight_rms=(0.0,)) for i in range(4)]
        assert fed(UpdateRatio, [row(probe.step, probe=probe) for probe in nothing]) == []
