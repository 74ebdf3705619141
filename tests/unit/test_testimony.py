"""Hearing an old batch: when it is asked, what its word weighs, and that asking leaves no trace."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from steadystep.accumulation import Passes
from steadystep.accumulation.recipe import Recipe
from steadystep.buffers import Buffers
from steadystep.diagnosis import first_sign, needs_witness, weigh
from steadystep.diagnosis.testimony import has_drifted
from steadystep.precision import Precision
from steadystep.records import Finding, Severity, Signals, Witness
from tests.loops import assert_same, batches, full_state, small_net, squared

CALM = Signals(step=100, loss=2.0, grad_norm=1.0, lr=0.1)
SEVERITIES = st.sampled_from(["info", "warn", "act", "critical"])


def finding(detector: str, severity: Severity = "act", *, value: float = 3.0, **more: object) -> Finding:
    plain = {"detector": detector, "step": 100, "severity": severity, "value": value, "limit": 2.2, "usual": 2.0}
    return Finding(**plain | more)


class TestWhenItIsAsked:
    def test_when(self) -> None:
        for found, refused, input_finite, asked in (
            (finding("not-healing"), 0, None, True),
            (finding("slow-divergence", "info"), 0, None, True),
            (finding("slow-divergence", "warn", value=2.1), 0, None, False),  # cannot become a drift
            (finding("gradient-spike"), 5, None, False),
            (finding("worse-than-best"), 0, None, False),
            (finding("non-finite", "critical"), 1, None, False),
            (finding("non-finite", "critical"), 2, None, True),
            (finding("non-finite", "critical"), 2, True, True),
            (finding("non-finite", "critical"), 2, False, False),  # the data is the cause
            (finding("non-finite", "info"), 9, None, False),  # a scaler's routine
        ):
            signals = replace(CALM, refused_in_a_row=refused, input_finite=input_finite)
            assert needs_witness(signals, (found,)) is asked, found
            assert needs_witness(signals, (finding("loss-spike", "info"), found)) is asked, found

    def test_nothing_found_asks_nobody(self) -> None:
        assert not needs_witness(replace(CALM, refused_in_a_row=9), ())

    def test_it_must_be_older_than_the_first_sign(self) -> None:
        assert first_sign((finding("a", since=80), finding("b", since=90), finding("c"))) == 80
        assert first_sign((finding("c"),)) == 100


def heard(then: float, now: float, *, loss: float = 3.0) -> Signals:
    return replace(CALM, loss=loss, witness=Witness(step=50, then=then, now=now))


class TestWhatItWeighs:
    @given(st.sampled_from(["not-healing", "slow-divergence", "gradient-spike", "mine"]), SEVERITIES)
    def test_nobody_heard_changes_nothing(self, detector: str, severity: Severity) -> None:
        found = (finding(detector, severity),)
        assert weigh(CALM, found) == found

    @given(SEVERITIES)
    def test_a_batch_that_has_become_worse_makes_a_suspicion_a_case(self, severity: Severity) -> None:
        (found,) = weigh(heard(2.0, 2.3), (finding("slow-divergence", severity),))
        assert found == finding("slow-divergence", "act")

    def test_one_that_has_not_takes_the_urgency_away(self) -> None:
        for severity, left in (("info", "info"), ("warn", "warn"), ("act", "warn"), ("critical", "warn")):
            (found,) = weigh(heard(2.0, 2.0), (finding("slow-divergence", severity),))
            assert found.severity == left

    def test_a_jump_that_the_weights_do_not_explain_is_a_warning(self) -> None:
        assert weigh(heard(2.0, 2.0), (finding("not-healing"),))[0].severity == "warn"
        assert weigh(heard(2.0, 2.9), (finding("not-healing"),))[0].severity == "act"
        assert weigh(heard(2.0, math.nan), (finding("not-healing"),))[0].severity == "act"
        assert weigh(heard(2.0, 2.9), (finding("not-healing", "warn"),))[0].severity == "act"

    def test_others_are_not_its_business(self) -> None:
        found = (finding("gradient-spike"), finding("non-finite", "critical"), finding("mine"))
        assert weigh(heard(2.0, 2.0), found) == found


class TestDrift:
    def test_when(self) -> None:
        for then, now, found, drifted in (
            (2.0, 2.21, finding("slow-divergence"), True),
            (2.0, 2.19, finding("slow-divergence"), False),  # the finding's own margin is 0.2
            (10.0, 10.29, finding("slow-divergence"), False),  # three hundredths of the batch's own loss
            (10.0, 10.31, finding("slow-divergence"), True),
            (-10.0, -9.71, finding("slow-divergence"), False),
            (-10.0, -9.69, finding("slow-divergence"), True),
            (2.0, 9.0, finding("slow-divergence", value=2.1), False),  # the loss itself has not risen enough
            (2.0, math.nan, finding("slow-divergence"), True),
            (2.0, math.inf, finding("slow-divergence"), True),
            (2.0, 9.0, finding("slow-divergence", usual=None), False),
        ):
            assert has_drifted(heard(then, now), found) is drifted, (then, now, found)

    def test_nobody_heard_is_no_drift(self) -> None:
        assert not has_drifted(CALM, finding("slow-divergence"))

    @given(st.floats(-100.0, 100.0), st.floats(0.0, 10.0), st.floats(0.0, 10.0))
    def test_the_worse_the_surer(self, then: float, worse: float, more: float) -> None:
        found = finding("slow-divergence")
        assert not has_drifted(heard(then, then), found)
        assert not has_drifted(heard(then, then + worse), found) or has_drifted(heard(then, then + worse + more), found)


def passes(model: nn.Module, *, size: int = 1) -> tuple[Passes, torch.optim.Optimizer, Buffers]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    buffers = Buffers(model, restores=True)
    precision = Precision("fp32", device_type="cpu", autocast=True)
    parameters = list(model.parameters())
    made = Passes(optimizer, precision, buffers, lambda: parameters, size=size, device=torch.device("cpu"), retry=True)
    return made, optimizer, buffers


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    grads = {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return full_state(model, optimizer) | grads | {"rng": torch.get_rng_state()}


class TestAskingLeavesNoTrace:
    @pytest.mark.parametrize("backward", [True, False])
    def test_of_itself(self, backward: bool) -> None:
        model = small_net()
        made, optimizer, _ = passes(model)
        first, second = batches(2)
        recipe = Recipe(lambda: squared(model, first), None, device=torch.device("cpu"))
        state = torch.get_rng_state()
        expected = squared(model, first).item()
        torch.set_rng_state(state)
        made.close()  # the buffers as they are now are good
        made.add(lambda: squared(model, second), batch=None, weight=None)
        model[0].weight.grad.fill_(7.0)
        before = everything(model, optimizer)
        assert made.try_again(recipe, backward=backward) == pytest.approx(expected)
        assert_same(before, everything(model, optimizer))
        assert len(made.group.members) == 1

    @pytest.mark.parametrize("backward", [True, False])
    def test_of_a_closure_that_raises(self, backward: bool) -> None:
        model = small_net()
        made, optimizer, _ = passes(model)

        def closure() -> Tensor:
            squared(model, batches(1)[0])  # moves buffers and random numbers
            random.choice([])
            return torch.zeros(())

        recipe = Recipe(closure, None, device=torch.device("cpu"))
        torch.rand(1)
        before = everything(model, optimizer)
        assert made.try_again(recipe, backward=backward) is None
        assert_same(before, everything(model, optimizer))

    def test_a_loss_without_a_graph_cannot_be_asked_for_its_gradient(self) -> None:
        model = small_net()
        made, _, _ = passes(model)
        recipe = Recipe(lambda: torch.tensor(3.0), None, device=torch.device("cpu"))
        assert made.try_again(recipe, backward=False) == 3.0
        assert made.try_again(recipe, backward=True) is None

    def test_with_backward_a_bad_gradient_or_buffer_is_an_infinite_loss(self) -> None:
        model = small_net(dropout=0.0)
        made, _, _ = passes(model)
        x = batches(1)[0]
        rooted = Recipe(lambda: (model(x) * 0.0).abs().sum().sqrt(), None, device=torch.device("cpu"))
        assert made.try_again(rooted, backward=False) == 0.0
        assert made.try_again(rooted, backward=True) == math.inf
        huge = Recipe(lambda: squared(model, x * 1e20) * 0.0, None, device=torch.device("cpu"))
        fine = Recipe(lambda: squared(model, x), None, device=torch.device("cpu"))
        assert made.try_again(huge, backward=True) == math.inf
        assert math.isfinite(made.try_again(fine, backward=True))

    def test_the_old_batch_is_run_with_its_own_random_numbers(self) -> None:
        model = small_net(dropout=0.5)
        made, _, _ = passes(model)
        x = batches(1)[0]
        recipe = Recipe(lambda: squared(model, x), None, device=torch.device("cpu"))
        expected = [made.try_again(recipe, backward=False) for _ in range(3) if torch.rand(3) is not None]
        assert len(set(expected)) == 1
        assert squared(model, x).item() != expected[0]
