"""Every kind of fault: only at its steps, the same each time, and nothing stays behind but the damage."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep.errors import ConfigError
from steadystep.faults import KINDS, NO_FAULT, Fault, parse
from tests.loops import assert_same, full_state

STEP = 3
SILENT = ("fp16-overflow", "fp16-underflow")  # in fp32 they change nothing at all


class Loop:
    """A plain loop with momentum, ReLUs and running statistics."""

    def __init__(self, spec: Any = None, seed: int = 0, *, adam: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        parameters = self.model.parameters()
        sgd = lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)  # noqa: E731
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01) if adam else sgd()
        self.fault: Fault = NO_FAULT
        if spec is not None:
            self.fault = parse(spec, model=self.model, optimizer=self.optimizer, seed=seed)
        self.seen: list[tuple[Any, ...]] = []

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(step)
        return torch.randn(8, 4, generator=rng), torch.randint(2, (8,), generator=rng)

    def compute(self, step: int) -> tuple[Any, ...]:
        batch = self.fault.batch(step, self.batch(step))
        self.optimizer.zero_grad()
        loss = self.fault.loss(step, nn.functional.cross_entropy(self.model(batch[0]), batch[1]))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), self.lr, [p.grad.clone() for p in self.model.parameters() if p.grad is not None], batch

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def run(self, start: int, stop: int) -> "Loop":
        for step in range(start, stop):
            with self.fault.at(step):
                self.seen.append(self.compute(step))
                self.optimizer.step()
        return self

    @property
    def state(self) -> dict[str, Tensor]:
        return full_state(self.model, self.optimizer)


def spec(kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "at": STEP, "for": 2} | more


def grads(loop: Loop, step: int = STEP) -> list[Tensor]:
    return loop.seen[step][2]


def test_before_its_steps_nothing_happens() -> None:
    clean = Loop().run(0, STEP).state
    for kind in KINDS:
        assert_same(Loop(spec(kind)).run(0, STEP).state, clean)


def test_at_its_steps_something_does() -> None:
    for kind in KINDS:
        loop, clean = Loop(spec(kind)).run(0, STEP + 2), Loop().run(0, STEP + 2)
        assert loop.fault.name == kind
        same = repr((loop.seen, loop.state)) == repr((clean.seen, clean.state))
        assert same == (kind in SILENT), kind


def test_after_its_steps_training_goes_on_as_ever() -> None:
    for kind in KINDS:
        loop, clean = Loop(spec(kind)).run(0, STEP + 2), Loop().run(0, STEP + 2)
        assert loop.lr == clean.lr, kind
        assert not any(p._backward_hooks for p in loop.model.parameters()), kind
        loop.model.load_state_dict(clean.model.state_dict())  # undo the damage
        loop.optimizer.load_state_dict(copy.deepcopy(clean.optimizer.state_dict()))
        assert_same(loop.run(STEP + 2, STEP + 5).state, clean.run(STEP + 2, STEP + 5).state)


def test_computing_again_within_the_step_repeats_it() -> None:
    for kind in KINDS:
        loop = Loop(spec(kind)).run(0, STEP)
        with loop.fault.at(STEP):
            assert repr(loop.compute(STEP)) == repr(loop.compute(STEP)), kind


def test_random_numbers_of_the_run_stay_where_they_are() -> None:
    for kind in KINDS:
        loop = Loop(spec(kind)).run(0, STEP)
        before = torch.get_rng_state()
        loop.run(STEP, STEP + 1)
        assert torch.equal(before, torch.get_rng_state()), kind


def test_seed_and_step_alone_choose_what_was_left_open() -> None:
    drawn = ("bad-gradient", "bad-weight", "bit-flip", "bad-input", "shuffled-labels", "frozen-layer", "zeroed-layer")
    for kind in drawn:
        ends = []
        for seed in (0, 0, 1, 2, 3, 4, 5):
            torch.manual_seed(99)
            ends.append(repr(Loop(spec(kind, **{"for": 1}), seed).run(0, STEP + 1).state))
        assert ends[0] == ends[1], kind
        if kind != "bad-input":  # a NaN anywhere spoils the whole batch
            assert len(set(ends)) > 1, kind


def test_a_seed_of_its_own_wins() -> None:
    states = []
    for own, seed in ((4, 0), (4, 1), (5, 0)):
        loop = Loop(spec("bad-weight", seed=own), seed)
        with loop.fault.at(STEP):
            states.append(loop.state)
    assert_same(states[0], states[1])
    assert repr(states[0]) != repr(states[2])


def test_the_sign_of_all_gradients_turns() -> None:
    loop, clean = Loop(spec("grad-sign-flip")).run(0, STEP + 1), Loop().run(0, STEP + 1)
    assert all(torch.equal(a, -b) for a, b in zip(grads(loop), grads(clean), strict=True))


def test_the_gradients_of_one_layer_grow() -> None:
    loop, clean = Loop(spec("grad-scale", factor=100, layer="3")).run(0, STEP + 1), Loop().run(0, STEP + 1)
    factors = [1, 1, 1, 1, 100, 100]
    assert all(torch.equal(a, b * k) for a, b, k in zip(grads(loop), grads(clean), factors, strict=True))


def test_gradients_that_were_not_cleared_pile_up() -> None:
    loop = Loop(spec("missing-zero-grad"))
    with loop.fault.at(STEP - 1):
        before = loop.compute(STEP - 1)[2]
    clean = Loop()
    clean.compute(STEP - 1)
    own = [clean.compute(step)[2] for step in (STEP, STEP + 1, STEP + 2)]
    seen = []
    for step in (STEP, STEP + 1, STEP + 2):
        with loop.fault.at(step):
            seen.append(loop.compute(step)[2])
    assert all(torch.equal(a, b + c) for a, b, c in zip(seen[0], own[0], before, strict=True))
    assert all(torch.equal(a, b + c) for a, b, c in zip(seen[1], own[1], seen[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(seen[2], own[2], strict=True))


def test_what_was_not_cleared_counts_once_in_a_group_of_micro_batches() -> None:
    weight = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    fault = parse({"kind": "missing-zero-grad", "at": 1}, model=weight, optimizer=optimizer)
    totals = []
    for step in range(3):
        with fault.at(step):
            for size in (1.0, 10.0):
                weight(torch.full((1, 1), size)).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.weight.grad is not None
        totals.append(weight.weight.grad.item())
        optimizer.zero_grad(set_to_none=False)
    assert totals == [11.0, 22.0, 11.0]


def test_one_weight_goes_bad_and_no_other() -> None:
    loop = Loop({"kind": "bad-weight", "at": STEP, "value": "-inf", "parameter": "3.weight", "element": 5})
    before = loop.state
    with loop.fault.at(STEP):
        pass
    changed = {name: int((loop.state[name] != value).sum()) for name, value in before.items()}
    assert {name: n for name, n in changed.items() if n} == {"model.3.weight": 1}
    assert loop.model[3].weight.flatten()[5] == -math.inf


def test_any_bit_flips_one_bit() -> None:
    for seed in range(40):
        loop = Loop(spec("bit-flip", bit="any"), seed)
        before = loop.state
        with loop.fault.at(STEP):
            pass
        bits = sum(
            bin(int(x) & 0xFFFFFFFF).count("1")
            for name, value in before.items()
            if value.dtype == torch.float32
            for x in (value.view(torch.int32) ^ loop.state[name].view(torch.int32)).flatten()
        )
        assert bits == 1


def test_a_chosen_bit_is_the_one_that_flips() -> None:
    loop = Loop(spec("bit-flip", bit=0, parameter="3.weight", element=2))
    before = loop.state["model.3.weight"].view(torch.int32)
    with loop.fault.at(STEP):
        changed = before ^ loop.state["model.3.weight"].view(torch.int32)
    assert changed.flatten().tolist() == [0, 0, 1] + [0] * 13


def test_one_number_of_the_batch_goes_bad() -> None:
    clean = Loop().batch(STEP)
    x, y = Loop(spec("bad-input", element=-1)).fault.batch(STEP, clean)
    assert x.isnan().flatten().tolist() == [False] * 31 + [True]
    assert torch.equal(x[:-1], clean[0][:-1])
    assert torch.equal(y, clean[1])
    assert not clean[0].isnan().any()


def test_labels_lose_their_inputs_and_none_is_lost() -> None:
    loop, clean = Loop(spec("shuffled-labels")).run(0, STEP + 2), Loop()
    for step in (STEP, STEP + 1):
        x, y = loop.seen[step][3]
        assert torch.equal(x, clean.batch(step)[0])
        assert torch.equal(y.sort()[0], clean.batch(step)[1].sort()[0])


def test_a_constant_batch_is_constant_in_one_part() -> None:
    x, y = Loop(spec("data-constant", value=2)).run(0, STEP + 1).seen[STEP][3]
    assert x.eq(2).all()
    assert torch.equal(y, Loop().batch(STEP)[1])


def test_a_frozen_layer_stays_and_the_others_learn() -> None:
    loop = Loop(spec("frozen-layer", layer="0")).run(0, STEP)
    frozen, other = loop.model[0].weight.clone(), loop.model[3].weight.clone()
    loop.run(STEP, STEP + 1)  # momentum and weight decay would move it
    assert torch.equal(frozen, loop.model[0].weight)
    assert not torch.equal(other, loop.model[3].weight)
    assert [not g.any() for g in grads(loop)] == [True, True, False, False, False, False]
    loop.run(STEP + 1, STEP + 3)
    assert not torch.equal(frozen, loop.model[0].weight)


def test_a_frozen_layer_stays_when_the_step_breaks() -> None:
    loop = Loop(spec("frozen-layer", layer=0))
    before = loop.model[0].weight.clone()
    with pytest.raises(RuntimeError, match="broken"), loop.fault.at(STEP):
        _break(loop.model[0].weight)
    assert torch.equal(before, loop.model[0].weight)
    assert not loop.model[0].weight._backward_hooks


def _break(weight: Tensor) -> None:
    nn.init.zeros_(weight)
    raise RuntimeError("broken")


def test_a_layer_becomes_zero_and_no_other() -> None:
    loop = Loop(spec("zeroed-layer", layer=-1))
    before = loop.state
    with loop.fault.at(STEP):
        changed = [name for name, value in before.items() if not torch.equal(value, loop.state[name])]
    assert changed == ["model.3.weight", "model.3.bias"]
    assert not loop.model[3].weight.any()


def test_no_relu_fires_any_more() -> None:
    loop = Loop(spec("dead-relus")).run(0, STEP)
    with loop.fault.at(STEP):
        hidden = loop.model[:3](loop.batch(STEP)[0])
    assert not hidden.any()
    assert loop.model[1].bias.eq(-1e3).all()  # of the norm, which stands between
    assert not loop.model[0].bias.eq(-1e3).any()


def test_relus_called_as_functions_are_named() -> None:
    loop = Loop(spec("dead-relus", layer="3", bias=-50))
    with loop.fault.at(STEP):
        assert loop.model[3].bias.eq(-50).all()
        assert not loop.model[1].bias.eq(-50).any()


def test_moments_are_scaled_and_step_counts_are_not() -> None:
    loop = Loop(spec("moments-scale", factor=0.5, moments="exp_avg_sq"), adam=True).run(0, STEP)
    before = loop.state
    with loop.fault.at(STEP):
        for name, value in before.items():
            assert torch.equal(loop.state[name], value * 0.5 if name.endswith("exp_avg_sq") else value), name


def test_moments_are_lost_altogether() -> None:
    loop = Loop(spec("moments-scale"), adam=True).run(0, STEP)
    with loop.fault.at(STEP):
        for name, value in loop.state.items():
            if "exp_avg" in name:
                assert not value.any(), name
            if name.endswith(".step"):
                assert value == STEP


def test_the_rate_creeps_only_as_long_as_told() -> None:
    loop = Loop({"kind": "lr-creep", "at": 1, "for": 2, "growth": 2.0}).run(0, 5)
    assert [seen[1] for seen in loop.seen] == pytest.approx([0.1, 0.2, 0.4, 0.1, 0.1])


def test_a_rate_that_creeps_for_ever_becomes_infinite_in_the_end() -> None:
    loop = Loop({"kind": "lr-creep", "at": 0, "growth": 10.0})
    with loop.fault.at(1000):
        assert loop.lr == math.inf
    assert loop.lr == 0.1


def test_the_drift_is_in_the_loss_alone() -> None:
    loop, clean = Loop(spec("loss-drift", per_step=0.5)).run(0, STEP + 3), Loop().run(0, STEP + 3)
    above = [a[0] - b[0] for a, b in zip(loop.seen, clean.seen, strict=True)]
    assert above == pytest.approx([0] * STEP + [0.5, 1.0, 0.0], abs=1e-6)
    assert_same(loop.state, clean.state)


def bits_of(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, int]:
    """Bits that differ, by name; of what is fp32."""
    real = {name: value for name, value in before.items() if value.dtype == torch.float32}
    flips = {name: value.view(torch.int32) ^ after[name].view(torch.int32) for name, value in real.items()}
    counts = {name: sum(bin(int(x) & 0xFFFFFFFF).count("1") for x in bits.flatten()) for name, bits in flips.items()}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    ("target", "name"), [("moment", "3.weight"), ("buffer", "1.running_var"), ("weight", "0.bias")]
)
def test_what_is_stored_loses_one_bit(target: str, name: str) -> None:
    loop = Loop(spec("bit-flip", target=target, parameter=name, bit="any")).run(0, STEP)
    before = loop.state
    with loop.fault.at(STEP):
        (hit,) = bits_of(before, loop.state).items()
    assert hit[1] == 1
    assert ("model." in hit[0]) == (target != "moment")
    assert (name in hit[0]) == (target != "moment")


@pytest.mark.parametrize("target", ["gradient", "activation", "matmul"])
def test_what_is_computed_is_hit_each_time_or_once(target: str) -> None:
    clean = Loop().run(0, STEP).compute(STEP)
    often = Loop(spec("bit-flip", target=target, parameter=-1, bit="sign")).run(0, STEP)
    once = Loop(spec("bit-flip", target=target, parameter=-1, bit="sign", transient=True)).run(0, STEP)
    with often.fault.at(STEP):
        spoilt = repr(often.compute(STEP))
        assert repr(often.compute(STEP)) == spoilt != repr(clean)
    with once.fault.at(STEP):
        assert repr(once.compute(STEP)) == spoilt
        assert repr(once.compute(STEP)) == repr(clean)
    assert repr(often.compute(STEP)) == repr(clean)


@pytest.mark.parametrize("where", ["sign", "exponent", "mantissa"])
def test_a_part_of_the_number_is_drawn_from(where: str) -> None:
    low, high = {"sign": (31, 31), "exponent": (23, 30), "mantissa": (0, 22)}[where]
    for seed in range(20):
        loop = Loop(spec("bit-flip", parameter="3.weight", element=0, bit=where), seed)
        before = int(loop.model[3].weight.data.view(torch.int32)[0, 0]) & 0xFFFFFFFF
        with loop.fault.at(STEP):
            after = int(loop.model[3].weight.data.view(torch.int32)[0, 0]) & 0xFFFFFFFF
        assert low <= (before ^ after).bit_length() - 1 <= high


@pytest.mark.parametrize("value", [0, 1])
def test_a_stuck_bit_stays_what_it_is(value: int) -> None:
    loop = Loop(spec("bit-flip", parameter="3.weight", element=0, bit=22, stuck=value))
    for step in (STEP, STEP + 1):
        with loop.fault.at(step):
            assert int(loop.model[3].weight.data.view(torch.int32)[0, 0]) >> 22 & 1 == value


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"target": "wire"}, "expected one of weight, moment"),
        ({"stuck": 2}, "expected 0 or 1"),
        ({"transient": 1}, "expected true or false"),
        ({"transient": True}, "a weight is stored"),
        ({"target": "buffer", "parameter": "1.running_vor"}, "did you mean '1.running_var'"),
        ({"target": "matmul", "parameter": "2"}, "no matmul '2' among 2"),
    ],
)
def test_a_flip_that_cannot_be(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Loop(spec("bit-flip", **more))
