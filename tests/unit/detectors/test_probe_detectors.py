"""Detectors that live on probes and on per-tensor norms: what they say, when they are quiet, and that they resume."""

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from steadystep.detectors.adam_moments import PoisonedMoments, RmsSurprise
from steadystep.detectors.detector import Detector, Runs
from steadystep.detectors.layers import AttentionLogitGrowth, DeadUnits, EmbeddingGrowth, UpdateRatio
from steadystep.detectors.no_learning import SaturatedUnits
from steadystep.detectors.vanishing_gradient import VanishingGradient, ZeroGradient
from steadystep.records import Finding, Probe, Signals
from steadystep.signals.activations import Activations
from steadystep.signals.gradients import Gradients
from steadystep.signals.probes import UpdateProbes

ALL: list[Callable[[], Detector]] = [
    UpdateRatio,
    RmsSurprise,
    PoisonedMoments,
    DeadUnits,
    SaturatedUnits,
    EmbeddingGrowth,
    AttentionLogitGrowth,
    VanishingGradient,
    ZeroGradient,
]
every_detector = pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
NAMES = ("a.weight", "a.bias", "b.weight", "c.weight", "d.weight")


def run(detector: Detector, signals: Sequence[Signals]) -> list[Finding]:
    return [finding for each in signals for finding in detector.update(each)]


def signals(step: int, *, norms: Sequence[float] = (), loss: float = 1.0, **more: Any) -> Signals:
    names = tuple(f"{i}.weight" for i in range(len(norms)))
    return Signals(
        step=step,
        loss=loss,
        grad_norm=math.hypot(*norms),
        norms=tuple(norms),
        names=names,
        lr=more.pop("lr", 1e-3),
        **more,
    )


def at_probes(fields: dict[str, Any], *, number: int, first: int = 1, **more: Any) -> list[Signals]:
    """As many probes 64 steps apart, each with the look that follows."""
    steps = [64 * (first + i) for i in range(number)]
    return [signals(s + 1, probe=Probe(step=s, **fields), **more) for s in steps]


# Contract


any_float = st.one_of(
    st.sampled_from([0.0, 1e-12, 1e-7, 0.9, 1.0, 1e3, 1e30, math.nan, math.inf, -math.inf]), st.floats(0, 10)
)
five = st.lists(any_float, min_size=5, max_size=5).map(tuple)
two = st.lists(any_float, min_size=2, max_size=2).map(tuple)


@st.composite
def histories(draw: st.DrawFn) -> list[Signals]:
    out = []
    for i in range(draw(st.integers(0, 24))):
        step = i * 16
        probe = None
        if draw(st.booleans()):
            probe = Probe(
                step=step,
                names=NAMES,
                weight_rms=draw(five),
                update_rms=draw(five),
                second_moments=draw(st.one_of(five, st.just(()))),
                surprises=draw(st.one_of(five, st.just(()))),
                zero_shares=draw(five),
                modules=("x", "y"),
                dead=draw(two),
                saturated=draw(two),
                tables=("x", "y"),
                row_norms=draw(two),
                attentions=("x", "y"),
                logit_bounds=draw(two),
            )
        norms = draw(st.one_of(five, st.just((0.0,) * 5)))
        loss, lr = draw(any_float), draw(any_float)
        total = sum(norms)
        out.append(Signals(step=step, loss=loss, grad_norm=total, norms=norms, names=NAMES, lr=lr, probe=probe))
    return out


@given(history=histories(), cut=st.integers(0, 24))
def test_resume_is_invisible_and_no_number_raises(history: list[Signals], cut: int) -> None:
    for make in ALL:
        whole, again, first, second = make(), make(), make(), make()
        expected = run(whole, history)
        assert repr(run(again, history)) == repr(expected)
        got = run(first, history[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert second.state_dict() == first.state_dict()
        got += run(second, history[cut:])
        assert repr(got) == repr(expected)
        assert second.state_dict() == whole.state_dict()


@every_detector
def test_without_gradients_or_probes_nothing_is_said(make: Callable[[], Detector]) -> None:
    empty = Probe(step=64)
    steps = [signals(s, norms=(1.0,), probe=empty if s % 64 == 1 else None) for s in range(400)]
    assert run(make(), steps) == []


# Update ratio


def ratios(*values: float) -> dict[str, Any]:
    return {"names": NAMES, "weight_rms": (1.0,) * 5, "update_rms": values}


def test_update_ratio_needs_three_probes_and_says_it_once() -> None:
    high = ratios(0.2, 0.0, 0.3, 0.2, 0.1)
    assert run(UpdateRatio(), at_probes(high, number=2, first=2)) == []
    (found,) = run(UpdateRatio(), at_probes(high, number=9, first=2))
    assert (found.severity, found.value, found.step) == ("info", 0.2, 257)
    broken = [*at_probes(high, number=2, first=2), *at_probes(ratios(*[0.01] * 5), number=1, first=4)]
    assert run(UpdateRatio(), [*broken, *at_probes(high, number=2, first=5)]) == []


def test_update_ratio_too_low_unless_the_learning_rate_is_zero() -> None:
    low = ratios(*[1e-8] * 5)
    (found,) = run(UpdateRatio(), at_probes(low, number=9, first=2))
    assert (found.severity, found.limit) == ("info", 1e-6)
    assert run(UpdateRatio(), at_probes(low, number=9, first=2, lr=0.0)) == []


def test_update_ratio_looks_at_weights_that_have_begun() -> None:
    fields = {"names": NAMES, "weight_rms": (1.0, 1.0, 0.0, 0.0, 0.0), "update_rms": (1e-3,) * 5}
    assert run(UpdateRatio(), at_probes(fields, number=9, first=2)) == []


# Moments


def moments(scale: float) -> dict[str, Any]:
    return {"names": ("0.weight", "1.weight", "2.weight"), "second_moments": (scale, 2 * scale, 3 * scale)}


def calm(number: int = 6) -> list[Signals]:
    return at_probes(moments(1e-6), number=number, norms=(1.0, 1.0, 1.0))


def test_poisoned_moments_ask_for_action_and_name_the_last_clean_probe() -> None:
    after = at_probes(moments(1e-3), number=8, first=7, norms=(1.0, 1.0, 1.0))
    found = run(PoisonedMoments(), [*calm(), *after])
    assert [f.step for f in found] == [449, 513, 577, 641], "then it is the new level"
    assert {(f.severity, f.since, f.where) for f in found} == {("act", 384, ("0.weight", "1.weight", "2.weight"))}
    assert found[0].value == pytest.approx(1000)


def test_moments_that_rose_with_the_gradient_are_right() -> None:
    after = at_probes(moments(1e-3), number=8, first=7, norms=(20.0, 20.0, 20.0))
    assert run(PoisonedMoments(), [*calm(), *after]) == []


def test_poisoned_moments_need_a_history() -> None:
    after = at_probes(moments(1e-3), number=1, first=4, norms=(1.0, 1.0, 1.0))
    assert run(PoisonedMoments(), [*calm(3), *after]) == []
    early = [signals(s + 1, norms=(1.0,) * 3, probe=Probe(step=s, **moments(10.0**-s))) for s in (1, 2)]
    assert run(PoisonedMoments(), [*early, *calm(3), *after]) == [], "the first steps do not count"


def test_one_tensor_of_many_is_not_enough() -> None:
    names = tuple(f"{i}.weight" for i in range(10))
    baseline = {"names": names, "second_moments": (1e-6,) * 10}
    odd = {"names": names, "second_moments": (1.0, *(1e-6,) * 9)}
    norms = (1.0,) * 10
    history = at_probes(baseline, number=6, norms=norms)
    assert run(PoisonedMoments(), [*history, *at_probes(odd, number=3, first=7, norms=norms)]) == []


def spiky(events: set[int]) -> list[Signals]:
    """v jumps after a large gradient in the intervals named, and has healed by the next probe."""
    out = []
    for i in range(1, 17):
        out.append(signals(64 * i - 10, norms=(1e3,) * 3 if i in events else (1.0,) * 3))
        out += at_probes(moments(1e-2 if i in events else 1e-6), number=1, first=i, norms=(1.0,) * 3)
    return out


def test_a_large_gradient_that_is_new_is_poison_and_a_habit_is_not() -> None:
    assert [f.step for f in run(PoisonedMoments(), spiky({12}))] == [769]
    assert run(PoisonedMoments(), spiky({2, 4, 9})) == []


def test_surprise_is_measured_against_each_tensors_own() -> None:
    def surprise(*values: float) -> dict[str, Any]:
        return {"names": NAMES, "surprises": values}

    baseline = at_probes(surprise(0.5, 0.5, 0.5, 0.5, 3.0), number=6)
    (found,) = run(RmsSurprise(), [*baseline, *at_probes(surprise(4.0, 4.0, 0.5, 0.5, 3.0), number=1, first=7)])
    assert (found.severity, found.value, found.where, found.since) == ("info", 8.0, ("a.weight", "a.bias"), 448)
    assert run(RmsSurprise(), [*baseline, *at_probes(surprise(4.0, 0.5, 0.5, 0.5, 3.0), number=1, first=7)]) == []
    assert run(RmsSurprise(), [*baseline, *at_probes(surprise(2.5, 2.5, 2.5, 2.5, 3.0), number=1, first=7)]) == []
    tiny = at_probes(surprise(*[0.01] * 5), number=6)
    assert run(RmsSurprise(), [*tiny, *at_probes(surprise(*[2.0] * 5), number=1, first=7)]) == []


# Units


def units(dead: tuple[float, ...] = (), saturated: tuple[float, ...] = ()) -> dict[str, Any]:
    return {"modules": ("x", "y"), "dead": dead, "saturated": saturated}


def test_dead_units_warn_once_for_each_module() -> None:
    found = run(DeadUnits(), at_probes(units(dead=(0.9, 0.1)), number=6))
    assert [(f.step, f.where, f.severity, f.value) for f in found] == [(193, ("x",), "warn", 0.9)]
    (late,) = run(
        DeadUnits(), [*at_probes(units(dead=(0.1, 0.1)), number=2), *at_probes(units(dead=(0.8, 0.9)), number=4)]
    )
    assert late.where == ("x", "y")
    swings = [
        p for i in range(4) for p in at_probes(units(dead=(0.9 if i % 3 else 0.0, math.nan)), number=1, first=i + 1)
    ]
    assert run(DeadUnits(), swings) == []


def test_saturation_matters_only_while_the_loss_is_high() -> None:
    start = [signals(0, loss=math.nan), signals(1, loss=2.0)]
    probes = units(saturated=(0.9, 0.1))
    (found,) = run(SaturatedUnits(), [*start, *at_probes(probes, number=6, loss=1.5)])
    assert (found.where, found.severity, found.step) == (("x",), "warn", 193)
    assert run(SaturatedUnits(), [*start, *at_probes(probes, number=6, loss=0.9)]) == []
    negative = [signals(0, loss=-1.0)]
    assert run(SaturatedUnits(), [*negative, *at_probes(probes, number=6, loss=-2.0)]) == []
    assert run(SaturatedUnits(), [*negative, *at_probes(probes, number=6, loss=-0.5)])


# Norms


def test_vanishing_gradient_is_a_ratio_and_lasts() -> None:
    for scale in (1e-20, 1.0, 1e20):
        fading = [signals(s, norms=tuple(scale * 10.0**-i for i in (7, 6, 4, 2, 1, 0, 0, 0))) for s in range(200)]
        (found,) = run(VanishingGradient(), fading)
        assert (found.step, found.since, found.severity) == (48, 0, "warn")
        assert found.where == ("0.weight", "1.weight")
    assert run(VanishingGradient(), fading[:48]) == []


def test_vanishing_gradient_leaves_healthy_shallow_and_dead_nets_alone() -> None:
    assert run(VanishingGradient(), [signals(s, norms=(1e-3, 1e-2, 0.1, 1.0)) for s in range(200)]) == []
    assert run(VanishingGradient(), [signals(s, norms=(1e-9, 1.0, 1.0)) for s in range(200)]) == []
    assert run(VanishingGradient(), [signals(s, norms=(0.0,) * 8) for s in range(200)]) == []


def test_all_zero_for_eight_steps() -> None:
    zero = [signals(s, norms=(0.0, 0.0)) for s in range(30)]
    (found,) = run(ZeroGradient(), zero)
    assert (found.step, found.severity, found.since) == (7, "warn", 0)
    mended = [*zero[:7], signals(7, norms=(1.0, 0.0)), *[signals(s, norms=(0.0, 0.0)) for s in range(8, 15)]]
    assert run(ZeroGradient(), mended) == []


def test_streaks_that_come_again_and_again_are_told_once() -> None:
    often = [signals(s, norms=(1.0, 0.5) if s % 10 == 9 else (0.0, 0.0)) for s in range(3000)]
    assert [found.step for found in run(ZeroGradient(), often)] == [7]
    rare = [signals(s, norms=(0.0, 0.0) if s % 2000 < 8 else (1.0, 0.5)) for s in range(6000)]
    assert [found.step for found in run(ZeroGradient(), rare)] == [7, 2007, 4007]
    soon = [signals(s, norms=(0.0, 0.0) if s % 900 < 8 else (1.0, 0.5)) for s in range(1800)]
    assert [found.step for found in run(ZeroGradient(), soon)] == [7]


def test_tensors_that_stop_one_after_another_are_told_together() -> None:
    def norms(step: int) -> tuple[float, ...]:
        return (1.0, *(0.0 if step >= 100 * i else 0.5 for i in range(1, 9)))

    loud = run(ZeroGradient(), [signals(s, norms=norms(s)) for s in range(1400)])
    assert {found.severity for found in loud} == {"warn"}
    assert [(found.step, len(found.where), found.since) for found in loud] == [
        (160, 1, 96),
        (660, 5, 196),
        (1160, 2, 696),
    ]


def test_one_tensor_without_gradient_is_a_note_after_a_long_while() -> None:
    steps = [signals(s, norms=(1.0, 0.0, 0.5)) for s in range(600)]
    (found,) = run(ZeroGradient(), steps)
    assert (found.step, found.severity, found.where) == (252, "info", ("1.weight",))
    steps[100] = signals(100, norms=(1.0, 1e-9, 0.5))
    (found,) = run(ZeroGradient(), steps)
    assert found.step == 100 + 4 * 64


def test_a_tensor_that_stops_learning_is_a_warning_once() -> None:
    alive, stopped = (1.0, 0.3, 0.5), (1.0, 0.0, 0.5)
    for others in (0.5, 0.0):  # the third may never have had one: the second is still worth a word
        steps = [signals(s, norms=(*alive[:2], others)) for s in range(100)]
        steps += [signals(s, norms=(*stopped[:2], others)) for s in range(100, 200)]
        steps += [signals(s, norms=(*alive[:2], others)) for s in range(200, 300)]
        steps += [signals(s, norms=(*stopped[:2], others)) for s in range(300, 700)]
        loud = [found for found in run(ZeroGradient(), steps) if found.severity == "warn"]
        assert [(found.step, found.where, found.since) for found in loud] == [(160, ("1.weight",), 96)]
    brief = [signals(s, norms=stopped if 100 <= s < 160 else alive) for s in range(400)]
    assert run(ZeroGradient(), brief) == []
    young = [signals(s, norms=alive if s < 28 else stopped) for s in range(200)]
    assert run(ZeroGradient(), young) == []


# Real runs


def train(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, *, steps: int, seed: int, every: int = 16, bad: int = -1
) -> list[Finding]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(512, 12, generator=rng)
    y = (x @ torch.randn(12, 3, generator=rng)).argmax(1)
    gradients, activations = Gradients(model, optimizer), Activations(model)
    probes = UpdateProbes(gradients, optimizer, activations=activations, every=every)
    detectors, found = [make() for make in ALL], []
    for step in range(steps):
        due = probes.due(step)
        if due:
            activations.start()
        i = torch.randint(512, (32,), generator=rng)
        loss = functional.cross_entropy(model(x[i]), y[i])
        activations.stop()
        optimizer.zero_grad()
        (loss * 1e4 if step == bad else loss).backward()
        names, grads, _ = gradients.collect()
        norms = torch._foreach_norm(grads)
        host = torch.cat([torch.stack([*norms, loss.detach()]), *probes.waiting]).tolist()
        each = tuple(host[: len(norms)])
        look = Signals(
            step=step,
            loss=host[len(norms)],
            grad_norm=math.hypot(*each),
            norms=each,
            names=names,
            lr=1e-3,
            probe=probes.read(host[len(norms) + 1 :]),
        )
        found += [f for detector in detectors for f in detector.update(look)]
        if due:
            probes.before()
        optimizer.step()
        if due:
            probes.after(step)
    return found


def net(activation: type[nn.Module], *, depth: int = 3) -> nn.Sequential:
    widths = [12, *[24] * depth]
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers, nn.Linear(24, 3))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("seed", range(2))
def test_healthy_training_is_quiet(activation: type[nn.Module], seed: int) -> None:
    torch.manual_seed(seed)
    for rule in (torch.optim.AdamW, torch.optim.SGD):
        model = net(activation)
        assert (
            train(model, rule(model.parameters(), lr=3e-3 if rule is torch.optim.AdamW else 0.1), steps=240, seed=seed)
            == []
        )


def test_one_batch_with_huge_gradients_poisons_adam() -> None:
    model = net(nn.ReLU)
    found = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps=180, seed=0, bad=150)
    (poison,) = [f for f in found if f.detector == "poisoned-moments" and f.step < 165]
    assert (poison.step, poison.since, poison.severity) == (161, 144, "act")


def test_a_deep_sigmoid_net_vanishes_and_a_negative_bias_kills_a_layer() -> None:
    model = net(nn.Sigmoid, depth=15)
    found = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps=60, seed=0)
    assert [f.detector for f in found] == ["vanishing-gradient"]
    model = net(nn.ReLU)
    nn.init.constant_(model[2].bias, -10.0)
    found = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps=60, seed=0)
    assert ("dead-units", ("3",)) in [(f.detector, f.where) for f in found]


def test_what_only_looks_at_probes_is_unmoved_by_steps_without_one() -> None:
    quiet = [detector for make in ALL if getattr(detector := make(), "only_probes", False)]
    assert {detector.name for detector in quiet} >= {"update-ratio", "dead-units", "rms-surprise"}
    for detector in quiet:
        before = detector.state_dict()
        for step, loss in enumerate((1.0, math.nan, 5.0)):
            assert detector.update(signals(step, norms=(1.0, math.inf), loss=loss)) == ()
        assert detector.state_dict() == before


def test_update_ratio_leaves_out_tensors_that_are_zero() -> None:
    nothing = {"names": NAMES, "weight_rms": (1e-30,) * 5, "update_rms": (1e-3,) * 5}
    assert run(UpdateRatio(), at_probes(nothing, number=9, first=2)) == []


def test_concerns_must_come_in_a_row() -> None:
    runs = Runs(patience=3)
    assert [runs.add({"a": concern}) for concern in (True, True, False, True, True)] == [()] * 5
    assert runs.add({"a": True}) == ("a",)
    assert runs.add({"a": True}) == ()


def test_a_loss_of_zero_needs_no_gradient() -> None:
    done = [signals(step, norms=(0.0, 0.0), loss=0.0) for step in range(40)]
    assert run(ZeroGradient(), done) == []


def test_a_scaler_that_loses_all_gradients_is_noted_at_each_step_from_the_third_on() -> None:
    alive = [signals(s, norms=(1.0, 0.5), scaled=True) for s in range(20)]
    zero = [signals(s, norms=(0.0, 0.0), scaled=True) for s in range(20, 32)]
    found = run(ZeroGradient(), [*alive, *zero])
    assert [each.step for each in found] == list(range(22, 32))
    assert [each.step for each in found if each.severity == "warn"] == [27]
    assert [each.step for each in run(ZeroGradient(), zero)] == [27]  # it never had a gradient
    unscaled = [signals(s, norms=each.norms) for s, each in enumerate([*alive, *zero])]
    assert [each.step for each in run(ZeroGradient(), unscaled)] == [27]


def test_a_run_that_comes_back_from_short_streaks_has_them() -> None:
    short = [signals(s, norms=(0.0, 0.0) if s % 20 > 14 else (1.0, 0.5), scaled=True) for s in range(95)]
    detector = ZeroGradient()
    assert [each.step for each in run(detector, short)] == [17, 18, 19]
    again = ZeroGradient()
    again.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    assert run(again, [signals(s, norms=(0.0, 0.0), scaled=True) for s in range(100, 106)]) == []
