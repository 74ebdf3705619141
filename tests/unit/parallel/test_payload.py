"""The arithmetic of agreement against what one process that sees all ranks would say."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadystep.errors import MisuseError
from steadystep.parallel.payload import (
    EVERYTHING,
    METRICS,
    PayloadLayout,
    damaged,
    decode,
    encode,
    mark,
    mark_number,
    same_on_all_ranks,
    shape_of,
)
from steadystep.parallel.replicas import Replicas, odd_ones
from steadystep.records import InputStats, Probe, Signals

NAMES = ("a", "b", "c")
BUFFERS = ("mean", "var")
PARTS = (
    "weight_rms",
    "update_rms",
    "second_moments",
    "surprises",
    "zero_shares",
    "dead",
    "saturated",
    "row_norms",
    "logit_bounds",
)

numbers = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf])
sizes = st.floats(0, 2.0**126, width=32) | st.sampled_from([math.nan, math.inf])


@st.composite
def ranks(draw: st.DrawFn) -> list[Signals]:
    size, micro = draw(st.sampled_from([1, 2, 3, 50])), draw(st.integers(1, 3))
    return [
        Signals(
            step=7,
            loss=draw(numbers),
            losses=tuple(draw(numbers) for _ in range(micro)),
            grad_norm=0.0,
            norms=tuple(draw(sizes) for _ in NAMES),
            names=NAMES,
            buffers=BUFFERS[: draw(st.integers(0, 2))],
            lr=0.1,
            repeatable=draw(st.booleans()),
            input_finite=draw(st.sampled_from([None, True, False])),
        )
        for _ in range(size)
    ]


def form(rank: int, size: int, micro: int = 3, questions: int = 0) -> PayloadLayout:
    return PayloadLayout(rank=rank, size=size, names=NAMES, buffers=BUFFERS, micro_batches=micro, questions=questions)


def with_peaks(signals: Signals, peak: float) -> Signals:
    bad = () if math.isfinite(peak) else signals.buffers
    return replace(signals, buffer_peaks=tuple(peak for _ in signals.buffers), bad_buffers=bad)


def added(ballots: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*ballots, strict=True)]


def alike(left: float, right: float) -> bool:
    return (math.isnan(left) and math.isnan(right)) or math.isclose(left, right, rel_tol=1e-9)


@given(ranks(), st.lists(sizes, min_size=60, max_size=60), st.integers(0, 2))
def test_every_rank_reads_what_one_process_would(said: list[Signals], peaks: list[float], sharded: int) -> None:
    size = len(said)
    said = [with_peaks(signals, peak) for signals, peak in zip(said, peaks, strict=False)]
    # The first `sharded` parameters are spread over the ranks; of the others every rank holds a copy.
    copies = {n: 1.0 if i < sharded else float(size) for i, n in enumerate(NAMES)}
    forms = [form(rank, size) for rank in range(size)]
    sums = added([encode(f, s, copies=copies) for f, s in zip(forms, said, strict=True)])
    heard = [decode(f, sums, s) for f, s in zip(forms, said, strict=True)]
    assert len({repr(agreed) for agreed in heard}) == 1, "ranks disagree"
    agreed = heard[0].signals
    assert heard[0].in_step
    assert heard[0].same_settings
    assert alike(agreed.loss, sum(s.loss for s in said) / size)
    for i, loss in enumerate(agreed.losses):
        assert alike(loss, sum(s.losses[i] for s in said) / size)
    for i, norm in enumerate(agreed.norms):
        held = [s.norms[i] for s in said]
        assert alike(norm, math.sqrt(sum(part * part for part in held) / (1 if i < sharded else size)))
    assert alike(agreed.grad_norm, math.hypot(*agreed.norms))
    bad = tuple(r for r, s in enumerate(said) if not math.isfinite(s.loss) or s.input_finite is False)
    assert agreed.bad_ranks == bad
    assert agreed.repeatable == all(s.repeatable for s in said)
    inputs = {s.input_finite for s in said}
    assert agreed.input_finite is (False if False in inputs else (True if True in inputs else None))
    assert set(agreed.buffers) == {name for s in said for name in s.buffers}
    assert set(agreed.bad_buffers) == {name for s in said for name in s.bad_buffers}
    for name, peak in zip(agreed.buffers, agreed.buffer_peaks, strict=True):
        seen = [s.buffer_peaks[0] for s in said if name in s.buffers]
        if all(map(math.isfinite, seen)):
            assert sum(seen) / len(seen) * (1 - 1e-9) <= peak <= max(seen) * (1 + 1e-9) + 1e-70
        else:
            assert not math.isfinite(peak)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_the_same_is_told_from_the_sums_alone(things: list[int]) -> None:
    marks = [mark(thing) for thing in things]
    total, squares = (sum(column) for column in zip(*marks, strict=True))
    assert same_on_all_ranks(total, squares, len(things)) == (len(set(things)) == 1)


def two(left: Signals, right: Signals, **more: list) -> list:
    forms = [form(rank, 2, questions=1 if "questions" in more else 0) for rank in (0, 1)]
    sides = [{key: values[rank] for key, values in more.items()} for rank in (0, 1)]
    ballots = [
        encode(f, s, copies=dict.fromkeys(NAMES, 2.0), **side)
        for f, s, side in zip(forms, (left, right), sides, strict=True)
    ]
    probes = more.get("probe", [None, None])
    return [decode(f, added(ballots), s, probe=p) for f, s, p in zip(forms, (left, right), probes, strict=True)]


CALM = Signals(step=7, loss=1.0, losses=(1.0,), grad_norm=1.0, norms=(1.0, 1.0, 1.0), names=NAMES, lr=0.1)


def changed(**more: object) -> Signals:
    return replace(CALM, **more)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (changed(step=8), "in_step"),
        (changed(losses=(1.0, 1.0)), "in_step"),
        (changed(refused_in_a_row=1), "in_step"),
        (changed(lr=0.1 * (1 + 1e-15)), "same_settings"),
        (changed(scale=2.0), "same_settings"),
    ],
)
def test_ranks_that_are_not_alike_are_told_so_together(other: Signals, field: str) -> None:
    assert all(getattr(agreed, field) for agreed in two(CALM, CALM))
    assert [getattr(agreed, field) for agreed in two(CALM, other)] == [False, False]


def test_weights_are_compared_by_their_checksums() -> None:
    assert [a.same_weights for a in two(CALM, CALM, checksum=[5, 5])] == [True, True]
    assert [a.same_weights for a in two(CALM, CALM, checksum=[5, 6])] == [False, False]


def test_one_wish_is_enough() -> None:
    assert [a.questions for a in two(CALM, CALM, questions=[[False], [True]])] == [(True,), (True,)]
    assert [a.questions for a in two(CALM, CALM, questions=[[False], [False]])] == [(False,), (False,)]


def test_one_rank_with_a_spoilt_state_is_known_to_all() -> None:
    """Each rank may hold tensors of other names, so that only whether is added up."""
    good, bad = {"state": ("a", "b"), "state_peaks": (1.0, 3e38)}, {"state": ("c",), "state_peaks": (math.nan,)}
    assert [a.damaged for a in two(changed(**good), changed(**bad))] == [True, True]
    assert [a.damaged for a in two(changed(state=("a",), state_peaks=(1.0,)), CALM)] == [False, False]
    looked = two(changed(state=("a",), state_peaks=(1.0,)), CALM)
    assert [a.signals.state_peaks for a in looked] == [(0.0,), (0.0,)]
    assert [a.signals.state_peaks for a in two(CALM, CALM)] == [(), ()]


def test_metrics_need_the_same_names() -> None:
    agreed = two(changed(metrics={"kl": 1.0, "b": 0.0}), changed(metrics={"b": 2.0, "kl": 3.0}))
    assert [a.signals.metrics for a in agreed] == [{"b": 1.0, "kl": 2.0}] * 2
    agreed = two(changed(metrics={"kl": 1.0}), changed(metrics={"entropy": 3.0}))
    assert [a.signals.metrics for a in agreed] == [{}, {}]
    many = {f"m{i:03d}": float(i) for i in range(METRICS + 5)}
    assert len(two(changed(metrics=many), changed(metrics=many))[0].signals.metrics) == METRICS


def test_a_probe_is_averaged_once_its_shape_is_known_to_be_the_same() -> None:
    probes = [Probe(step=4, names=("a",), weight_rms=(w,), modules=("relu",), dead=(w,)) for w in (0.0, 1.0)]
    other = Probe(step=4, names=("a",), weight_rms=(1.0,))
    assert [a.probe_fits for a in two(CALM, CALM, waiting=probes)] == [True, True]
    assert [a.probe_fits for a in two(CALM, CALM, waiting=[probes[0], other])] == [False, False]
    assert [a.probe_fits for a in two(CALM, CALM, waiting=[probes[0], None])] == [False, False]
    agreed = two(CALM, CALM, probe=probes)
    mean = Probe(step=4, names=("a",), weight_rms=(0.5,), modules=("relu",), dead=(0.5,))
    assert [a.signals.probe for a in agreed] == [mean, mean]


def test_first_batches_are_averaged() -> None:
    def stats(mean: float) -> InputStats:
        return InputStats(
            batches=4, mean=mean, std=1.0, largest=2.0, constant_share=0.0, scale_spread=1.0, finite=mean < 2.0
        )

    agreed = two(changed(inputs=stats(1.0)), changed(inputs=stats(3.0)))
    assert [a.signals.inputs.mean for a in agreed] == [2.0, 2.0]
    assert not agreed[0].signals.inputs.finite
    assert two(changed(inputs=stats(1.0)), CALM)[0].signals.inputs is None


def test_first_batches_of_all_ranks_are_finite_or_not() -> None:
    stats = InputStats(batches=3, mean=0.5, std=1.5, largest=2.5, constant_share=0.25, scale_spread=4.0, finite=True)
    for agreed in two(changed(inputs=stats), changed(inputs=stats)):
        assert agreed.signals.inputs == stats
    for agreed in two(changed(inputs=stats), changed(inputs=replace(stats, batches=4, finite=False))):
        assert agreed.signals.inputs == replace(stats, batches=4, finite=False)


def test_a_state_that_some_rank_looked_at_has_one_name() -> None:
    looked = two(changed(state=("a", "b"), state_peaks=(1.0, 2.0)), CALM)
    assert [(a.signals.state, a.signals.state_peaks) for a in looked] == [((EVERYTHING,), (0.0,))] * 2
    assert [(a.signals.state, a.signals.state_peaks) for a in two(CALM, CALM)] == [((), ())] * 2


@pytest.mark.parametrize("number", [0, 3, 2**20 - 1, 2**20, 2**21 - 1, 2**32 - 1, 2**40 + 77])
def test_squares_of_many_ranks_stay_exact(number: int) -> None:
    value, square = mark_number(number)
    assert value == number % 2**20
    assert square == value * value
    assert 8192 * square < 2**53
    assert same_on_all_ranks(8192 * value, 8192 * square, 8192)


@pytest.mark.parametrize("size", [1, 47, 48, 49, 96, 97, 200])
def test_bad_ranks_are_known_by_number_whatever_the_size(size: int) -> None:
    bad = {rank for rank in (0, 1, 46, 47, 48, 49, 95, 96, 97, 143, 144, size - 1) if rank < size}
    said = [changed(loss=math.nan) if rank in bad else CALM for rank in range(size)]
    copies = dict.fromkeys(NAMES, 1.0)
    sums = added([encode(form(rank, size), s, copies=copies) for rank, s in enumerate(said)])
    assert decode(form(0, size), sums, CALM).signals.bad_ranks == tuple(sorted(bad))


@pytest.mark.parametrize("field", ["in_step", "same_settings"])
def test_what_is_not_alike_is_raised(field: str) -> None:
    (agreed, _) = two(CALM, CALM)
    agreed.check(rank=0, step=7)
    with pytest.raises(MisuseError):
        replace(agreed, **{field: False}).check(rank=0, step=7)


def test_a_rank_that_sent_something_else_is_out_of_step() -> None:
    ballots = [encode(form(rank, 2), CALM, copies=dict.fromkeys(NAMES, 1.0)) for rank in (0, 1)]
    ballots[1][0] = 0.0
    assert not decode(form(0, 2), added(ballots), CALM).in_step


def test_a_probe_of_another_shape_is_told_by_any_of_its_parts() -> None:
    probe = Probe(step=4, names=("a",), weight_rms=(1.0,), modules=("m",), dead=(0.5,), tables=("t",), row_norms=(2.0,))
    shapes = [
        probe,
        replace(probe, step=5),
        replace(probe, names=("b",)),
        replace(probe, modules=("n",)),
        replace(probe, tables=("u",)),
        replace(probe, attentions=("q",)),
        replace(probe, update_rms=(1.0,)),
        replace(probe, logit_bounds=(1.0,)),
    ]
    assert len({shape_of(shape) for shape in shapes}) == len(shapes)
    assert shape_of(replace(probe, weight_rms=(9.0,), dead=(0.0,))) == shape_of(probe)


@given(st.lists(st.floats(0.0, 1e6), min_size=9, max_size=9))
def test_every_part_of_a_probe_comes_back_in_its_place(numbers: list[float]) -> None:
    parts = dict(zip(PARTS, ((number,) for number in numbers), strict=True))
    probe = Probe(step=4, names=("a",), **parts)
    assert [a.signals.probe for a in two(CALM, CALM, probe=[probe, probe])] == [probe, probe]


def test_a_copy_that_one_rank_holds_damaged_is_not_passed_over() -> None:
    damaged_here = changed(norms=(1.0, math.inf, 1.0))
    assert [math.isinf(a.signals.norms[1]) for a in two(CALM, damaged_here)] == [True, True]
    larger = changed(norms=(1.0, 7.0, 1.0))
    assert [a.signals.norms for a in two(CALM, larger)] == [(1.0, 5.0, 1.0)] * 2  # each copy counts half


def test_parameters_without_a_gradient_are_passed_over() -> None:
    part = changed(names=("c", "a"), norms=(2.0, 3.0))
    agreed = two(part, part)
    assert [a.signals.norms for a in agreed] == [(2.0, 3.0)] * 2
    assert agreed[0].signals.grad_norm == math.hypot(2.0, 3.0)


def test_which_tensors_are_damaged() -> None:
    signals = changed(state=("a", "b", "c", "d"), state_peaks=(1.0, math.inf, 2e38, -3.0))
    assert damaged(signals) == {"b": math.inf, "c": 2e38}


def test_who_differs_is_named_where_most_ranks_agree() -> None:
    assert odd_ones(["a", "b"], [[1, 2], [1, 2], [1, 2]]) == ()
    assert odd_ones(["a", "b"], [[1, 2], [1, 9], [1, 2]]) == ("b on rank 1",)
    assert odd_ones(["a", "b"], [[1, 2], [5, 2]]) == ("a on some rank",)


@given(st.integers(0, 31), st.integers(0, 11))
def test_one_flipped_bit_changes_the_checksum(bit: int, element: int) -> None:
    model = torch.nn.Linear(3, 4)
    before = Replicas(model).checksum(0)
    with torch.no_grad():
        weight = model.weight.view(-1).view(torch.int32)
        weight[element] = int(weight[element]) ^ (1 << bit if bit < 31 else -(1 << 31))
    assert Replicas(model).checksum(0) != before
    assert Replicas(model).checksum(1) == 0


@pytest.mark.parametrize(("size", "expected"), [(2, 1704), (8, 1704), (64, 1712), (1000, 1864)])
def test_the_ballot_hardly_grows_with_the_ranks(size: int, expected: int) -> None:
    """The numbers in docs/distributed.md: 150 tensors, one micro-batch, four questions."""
    names = tuple(f"layer {i}" for i in range(150))
    paper = PayloadLayout(rank=0, size=size, names=names, buffers=(), micro_batches=1, questions=4)
    signals = changed(names=names, norms=(1.0,) * 150)
    assert 8 * len(encode(paper, signals, copies=dict.fromkeys(names, 1.0), questions=[False] * 4)) == expected
