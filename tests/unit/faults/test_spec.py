"""Faults from plain data: what is declared is what happens, and a mistake says where it is."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadystep.errors import ConfigError, MisuseError, UnsupportedError
from steadystep.faults import KINDS, NO_FAULT, Fault, parse, scaled_data, shuffled_labels, together
from steadystep.faults.bits import flip
from steadystep.faults.fault import Element, draw, pick_layer
from steadystep.faults.kinds import COMMON, declared
from steadystep.faults.options import read_when

MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9)


def made(spec: Any, seed: int = 0) -> Fault:
    return parse(spec, model=MODEL, optimizer=OPTIMIZER, seed=seed)


def complaint(spec: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        made(spec)
    return str(caught.value)


steps = st.integers(0, 300)
lasting = st.integers(1, 50)


@given(st.lists(steps, min_size=1, max_size=4), lasting, st.sampled_from(["for", "steps"]))
def test_a_list_of_steps_and_how_long(starts: list[int], length: int, key: str) -> None:
    when = read_when({"at": starts, key: length})
    expected = {start + i for start in starts for i in range(length)}
    assert {step for step in range(400) if step in when} == expected
    assert when.first == min(expected)


@given(steps, lasting)
def test_all_ways_to_say_a_stretch_are_one(start: int, length: int) -> None:
    said = [
        {"at": f"{start}-{start + length - 1}"},
        {"at": {"start": start, "steps": length}},
        {"at": start, "for": length},
        {"at": [start], "steps": length},
    ]
    assert [read_when(entry).stretches for entry in said] == [(range(start, start + length),)] * 4


@given(steps)
def test_once_and_for_ever(start: int) -> None:
    assert read_when({"at": start}).stretches == (range(start, start + 1),)
    for entry in ({"at": start, "for": "ever"}, {"at": {"start": start, "steps": "ever"}}):
        assert start - 1 not in read_when(entry)
        assert start + 10**9 in read_when(entry)
    assert start + 10**9 in read_when({"at": start}, lasts="ever")


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(["", "ever", "3-1", "0", "nan"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["start", "steps", "x"]), inner),
    max_leaves=4,
)
keys = st.sampled_from([*COMMON, *sorted({key for kind in KINDS.values() for key in kind.options}), "x"])


@given(st.sampled_from([*KINDS, "x"]), st.dictionaries(keys, anything, max_size=5))
def test_whatever_is_declared_makes_a_fault_or_a_config_error(kind: str, entry: dict[str, Any]) -> None:
    try:
        fault = made({"kind": kind, "at": 1} | entry)
    except ConfigError as error:
        told = str(error).splitlines()
    else:
        told = []
        assert fault.name == entry.get("kind", kind)
        assert set(entry) <= {*COMMON, *KINDS[fault.name].options}
    assert all(line.startswith("fault") for line in told)


VALUES: dict[str, Any] = {
    "factor": st.floats(-1e6, 1e6),
    "value": st.sampled_from(["nan", "inf", "-inf", 0, 1.5]),
    "parameter": st.sampled_from(["0.weight", "2.bias", 0, -1, 3]),
    "element": st.sampled_from([0, -1]),
    "part": st.sampled_from([0, 1, "x"]),
    "layer": st.sampled_from(["0", "2"]),
    "power": st.integers(-126, 126),
    "bit": st.sampled_from(["top", "any", 0, 31]),
    "bias": st.floats(-1e6, 0),
    "moments": st.sampled_from(["momentum_buffer", ["exp_avg"]]),
    "growth": st.floats(1e-3, 10),
    "per_step": st.floats(-1, 1),
    "rank": st.integers(0, 3),
    "seed": st.integers(-5, 5),
    "for": st.integers(1, 9) | st.just("ever"),
}


@given(st.data())
def test_every_kind_takes_its_keys(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(KINDS)))
    allowed = [*KINDS[kind].options, "rank", "seed", "for"]
    chosen = data.draw(st.lists(st.sampled_from(allowed), unique=True))
    entry = {"kind": kind, "at": 7} | {key: data.draw(VALUES[key]) for key in chosen}
    fault = made(json.loads(json.dumps(entry)))
    assert fault.name == kind
    assert (7 in fault.steps) == (entry.get("rank", 0) == 0)
    assert 5 not in fault.steps


def test_the_defaults_pass_their_own_readers() -> None:
    for name, kind in KINDS.items():
        for key, option in kind.options.items():
            if option.default not in (None, ()):
                assert repr(option.read(option.default)) == repr(option.default), (name, key)


def test_the_page_has_every_kind_with_its_keys() -> None:
    page = (Path(__file__).parents[3] / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \| (.*?)\|$", page, re.M)}
    shown = {name: (about, tuple(re.findall(r"`(\w+)`", keys))) for name, (about, keys) in rows.items()}
    kinds = {name: (kind.about, tuple(kind.options)) for name, kind in KINDS.items()}
    assert {name: row for name, row in shown.items() if name in kinds} == kinds


def test_nan_is_a_word_in_json() -> None:
    values = [
        declared({"kind": "bad-loss", "at": 1, "value": v}, where="").options["value"] for v in ("NaN", "-inf", 3)
    ]
    assert math.isnan(values[0])
    assert values[1:] == [-math.inf, 3.0]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"kind": "grad-scal", "at": 1}, "fault.kind = 'grad-scal': unknown: did you mean 'grad-scale'?"),
        ({"kind": ["x"], "at": 1}, "fault.kind = ['x']: unknown"),
        ({"at": 1}, "fault: the key 'kind' is missing, one of grad-scale,"),
        ({"kind": "grad-scale"}, "fault: the key 'at' is missing, expected a step such as 500"),
        ({"kind": "lr-scale", "at": 1, "facter": 2}, "fault: unknown key 'facter': did you mean 'factor'?"),
        ({"kind": "lr-scale", "at": 1, "layer": "0"}, "fault: unknown key 'layer'"),
        (
            {"kind": "lr-scale", "at": 1, "factor": "big"},
            "fault.factor = 'big': expected a finite number (what to multiply by)",
        ),
        ({"kind": "lr-scale", "at": 1, "factor": math.inf}, "fault.factor = inf: expected a finite number"),
        ({"kind": "lr-scale", "at": 1, "factor": True}, "fault.factor = True: expected a finite number"),
        ({"kind": "lr-creep", "at": 1, "growth": 0}, "fault.growth = 0: expected a number above 0"),
        ({"kind": "lr-creep", "at": [1, 5]}, "fault.at = [1, 5]: lr-creep grows from one step on"),
        ({"kind": "bad-loss", "at": 1, "value": "big"}, "'nan', 'inf' or '-inf'"),
        ({"kind": "bit-flip", "at": 1, "bit": 64}, "fault.bit = 64: expected a bit from 0 to 63"),
        ({"kind": "bad-weight", "at": 1, "element": 1.5}, "fault.element = 1.5: expected an integer"),
        ({"kind": "fp16-overflow", "at": 1, "power": 200}, "fault.power = 200: expected an integer from -126"),
        ({"kind": "moments-scale", "at": 1, "moments": []}, "fault.moments = []: expected a name or a list"),
        ({"kind": "bad-loss", "at": 1, "rank": -1}, "fault.rank = -1: expected an integer of at least 0"),
        ({"kind": "bad-loss", "at": -1}, "fault.at = -1: expected a step such as 500"),
        ({"kind": "bad-loss", "at": True}, "fault.at = True: expected a step"),
        ({"kind": "bad-loss", "at": []}, "fault.at = []: expected a step"),
        ({"kind": "bad-loss", "at": "20-10"}, "fault.at = '20-10': expected a step"),
        ({"kind": "bad-loss", "at": {"start": 3, "stop": 5}}, "expected a step"),
        ({"kind": "bad-loss", "at": {"start": 3, "steps": 0}}, "fault.at.steps = 0: expected a number of steps"),
        ({"kind": "bad-loss", "at": 3, "for": "always"}, "fault.for = 'always': expected a number of steps"),
        ({"kind": "bad-loss", "at": 3, "for": 1, "steps": 1}, "fault: 'for' and 'steps' mean the same"),
        ({"kind": "bad-loss", "at": "3-5", "for": 1}, "fault.for = 1: 'at' already gives the duration"),
        ({"kind": "bad-gradient", "at": 1, "parameter": "0.wait"}, "fault: no trainable parameter '0.wait'"),
        ({"kind": "bad-gradient", "at": 1, "parameter": 0, "element": 12}, "fault: no element 12 in parameter 0"),
        ({"kind": "frozen-layer", "at": 1, "layer": "9"}, "fault: no layer '9' with trainable parameters among 2"),
        ({"kind": "dead-relus", "at": 1, "layer": "1"}, "fault: no layer '1'"),
        ("grad-scale", "faults: expected a mapping or a list of mappings, got str"),
        (["grad-scale"], "faults[0]: expected a mapping with 'kind' and 'at', got str"),
    ],
)
def test_a_mistake_says_what_and_where(spec: Any, said: str) -> None:
    assert said in complaint(spec)


def test_all_mistakes_are_told_at_once() -> None:
    told = complaint([{"kind": "bad-loss", "at": 1}, {"kind": "lr-scale", "at": -1, "factor": "x", "z": 1}, {"at": 2}])
    starts = [line.split(" ")[0] for line in told.splitlines()]
    assert starts == ["faults[1]:", "faults[1].at", "faults[1].factor", "faults[2]:"]


def test_no_relu_is_a_mistake_too() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"no nn\.ReLU after a layer with biases: set `layer`"):
        parse({"kind": "dead-relus", "at": 1}, model=model, optimizer=OPTIMIZER)


def test_several_are_one_and_each_keeps_its_steps() -> None:
    fault = made([{"kind": "lr-scale", "at": "1-2", "factor": 10}, {"kind": "bad-loss", "at": "2-3", "value": 2}])
    assert fault.name == "lr-scale + bad-loss"
    seen = []
    for step in range(5):
        with fault.at(step):
            seen.append((fault.loss(step, torch.tensor(1.0)).item(), OPTIMIZER.param_groups[0]["lr"]))
    assert seen == [(1.0, 0.1), (1.0, 1.0), (2.0, 1.0), (2.0, 0.1), (1.0, 0.1)]
    assert [step in fault.steps for step in range(5)] == [False, True, True, True, False]


def test_batches_go_through_one_after_the_other() -> None:
    fault = made([{"kind": "stale-batch", "at": 1}, {"kind": "data-scale", "at": 1, "factor": 3}])
    assert [fault.batch(step, torch.tensor(step + 1.0)).item() for step in range(3)] == [1.0, 3.0, 3.0]


def test_none_at_all_is_no_fault() -> None:
    assert made([]) is NO_FAULT
    assert together([NO_FAULT]) is NO_FAULT


def test_one_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = made({"kind": "bad-loss", "at": 1, "rank": 1})
    one = torch.tensor(1.0)
    assert not fault.loss(1, one).isnan()  # without a process group this is rank 0
    assert made({"kind": "bad-loss", "at": 1, "rank": 0}).loss(1, one).isnan()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, hit in ((0, False), (1, True), (2, False)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert bool(fault.loss(1, one).isnan()) is hit
        assert not fault.loss(2, one).isnan()


def test_a_stale_batch_is_a_copy_of_what_was_seen() -> None:
    fault, batch = made({"kind": "stale-batch", "at": 1}), torch.zeros(2)
    assert fault.batch(0, batch) is batch
    batch.fill_(7)  # a loader that reuses its memory
    assert not fault.batch(1, batch).any()


@pytest.mark.parametrize("kind", ["stale-batch", "missing-zero-grad"])
def test_what_needs_the_step_before_says_so(kind: str) -> None:
    fault = made({"kind": kind, "at": 5})
    with pytest.raises(MisuseError, match="at the previous step"), fault.at(5):
        fault.batch(5, torch.ones(1))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.SGD(MODEL.parameters(), lr=0.1), "it has no state yet"),
        (torch.optim.AdamW(MODEL.parameters(), lr=0.0), "it has exp_avg, exp_avg_sq"),
    ],
)
def test_moments_that_are_not_there_say_so(optimizer: torch.optim.Optimizer, said: str) -> None:
    MODEL(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    spec = {"kind": "moments-scale", "at": 0, "moments": "momentum_buffer"}
    fault = parse(spec, model=MODEL, optimizer=optimizer)
    with pytest.raises(MisuseError, match=f"no momentum_buffer, {said}"), fault.at(0):
        pass


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    y: torch.Tensor


def test_named_batches_keep_their_kind() -> None:
    x, y = torch.ones(2), torch.ones(2)
    pair = scaled_data(steps={0}, factor=2.0, part=1).batch(0, Pair(x, y))
    sample = scaled_data(steps={0}, factor=2.0, part="y").batch(0, Sample(x, y))
    for batch in (pair, sample):
        assert batch.x.eq(1).all()
        assert batch.y.eq(2).all()
    assert isinstance(pair, Pair)
    assert isinstance(sample, Sample)
    assert y.eq(1).all()


@pytest.mark.parametrize(
    ("fault", "batch", "said"),
    [
        (
            scaled_data(steps={0}, factor=2.0, part="z"),
            Sample(torch.ones(1), torch.ones(1)),
            "no part 'z'; it has x, y",
        ),
        (scaled_data(steps={0}, factor=2.0, part=2), (torch.ones(1), torch.ones(1)), "no part 2; it has 0, 1"),
        (scaled_data(steps={0}, factor=2.0), object(), "parts of a object"),
        (shuffled_labels(steps={0}), torch.ones(3), "this batch is one tensor"),
        (made({"kind": "data-constant", "at": 0, "value": "nan"}), (torch.ones(1).long(),), "cannot become nan"),
        (made({"kind": "bad-input", "at": 0}), torch.ones(1).long(), "real numbers"),
    ],
)
def test_a_batch_that_cannot_have_it_says_so(fault: Fault, batch: Any, said: str) -> None:
    with pytest.raises(MisuseError, match=said):
        fault.batch(0, batch)


def test_sparse_gradients_cannot_have_one_bad_element() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    fault = parse({"kind": "bad-gradient", "at": 0}, model=table, optimizer=OPTIMIZER)
    with pytest.raises(UnsupportedError, match="sparse"), fault.at(0):
        table(torch.tensor([1])).sum().backward()


def test_the_highest_bit_is_the_sign_and_there_is_none_above() -> None:
    for dtype, size in ((torch.float16, 16), (torch.float32, 32), (torch.float64, 64)):
        tensor = torch.ones(1, dtype=dtype)
        flip(tensor, 0, size - 1)
        assert tensor.item() == -1.0
        with pytest.raises(UnsupportedError, match=f"no bit {size}"):
            flip(tensor, 0, size)


def test_a_layer_by_name_may_hold_others() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.ReLU())
    assert pick_layer(model, "0") is model[0]
    assert pick_layer(model, 1) is model[0][1]
    model[0][0].requires_grad_(False)
    assert pick_layer(model, 0) is model[0][1]


def test_draws_are_the_same_everywhere() -> None:
    assert [draw(0, step, "element", 1000) for step in range(4)] == [92, 159, 351, 717]
    assert len({draw(seed, 5, "element", 10**9) for seed in range(50)}) == 50
    assert draw(0, 5, "element", 10**9) != draw(0, 5, "bit", 10**9)


def test_the_drawn_place_moves_with_the_step() -> None:
    place = Element(MODEL, parameter=None, element=None, seed=0)
    seen = {(id(parameter), element) for parameter, element in map(place.at, range(200))}
    assert len({target for target, _ in seen}) == 4
    assert len(seen) > 15
    assert all(0 <= element < 12 for _, element in seen)
    assert len({Element(MODEL, parameter=0, element=None, seed=seed).at(0)[1] for seed in range(20)}) > 5


def test_a_number_that_yaml_reads_as_text_is_a_number() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fault = parse({"kind": "lr-scale", "at": 1, "factor": "1e3"}, model=model, optimizer=optimizer)
    with fault.at(1):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(100.0)
    with pytest.raises(ConfigError, match="finite number"):
        parse({"kind": "lr-scale", "at": 1, "factor": "often"}, model=model, optimizer=optimizer)
