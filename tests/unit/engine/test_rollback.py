"""Recovery through the guard: real small models, findings at will, and what each setting does."""

import gc
import math
import random
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.engine.judge import Judge
from steadystep.engine.verdict import settle
from steadystep.policy import Budget, Limits
from steadystep.records import Finding, Outcome, Signals
from steadystep.testing import check_detector
from tests.loops import assert_same, batches, full_state, plain_run, small_net, squared

AT = 62  # not a step before which a state is taken: that would be one of damaged weights

# Only the gate and what a test adds itself.
ALONE = {"training": {"stability_monitoring": False}}


class Says:
    """Claims what it is told to, at the steps it is told to; the claim has no margin, so any damage confirms it."""

    def __init__(self, detector: str, at: Mapping[int, int | None], **more: Any) -> None:
        self.name = detector
        self._at = at
        self._more = more

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        if signals.step not in self._at:
            return ()
        plain = {"severity": "act", "value": 9e9, "limit": 9e9, "baseline": 9e9, "since": self._at[signals.step]}
        return (Finding(detector=self.name, step=signals.step, **plain | self._more),)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class LowAccuracy:
    """A detector of one's own, in ten lines."""

    name = "low-accuracy"

    def __init__(self) -> None:
        self.best = 0.0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        now = signals.metrics.get("accuracy", self.best)
        self.best = max(self.best, now if math.isfinite(now) else 0.0)
        low = now < self.best / 2
        what = {"value": now, "limit": self.best / 2, "what": "accuracy fell"}
        return (Finding(detector=self.name, step=signals.step, severity="warn", **what),) if low else ()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


def merged(*configs: Mapping[str, Any]) -> dict[str, Any]:
    sections = {key for config in configs for key in config}
    return {key: {k: v for config in configs for k, v in config.get(key, {}).items()} for key in sections}


def damage(model: nn.Module) -> None:
    with torch.no_grad():
        model[6].weight.mul_(30.0)


def rolling(at: int = AT, *, steps: int = 80, **recovery: Any) -> tuple[list[Outcome], steadystep.Guard]:
    """A run whose weights are damaged at one step; snapshots as often as they may be taken."""
    model = small_net(dropout=0.0)
    config = merged(ALONE, {"recovery": {"trust_steps": 4} | recovery})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = steadystep.Guard(model, optimizer, config=config, detectors=[Says("weight-jump", {at: at})])
    outcomes = []
    for i, x in enumerate(batches(steps)):
        if i == at:
            damage(model)
        outcomes.append(guard.step(lambda x=x: squared(model, x)))
    return outcomes, guard


def lasting(
    at: int = AT,
    *,
    says: Says | None = None,
    damaged: bool = True,
    steps: int = 40,
    given: str = "closures",
    **more: Any,
) -> tuple[list[Outcome], steadystep.Guard]:
    """Weights that were thrown off at one step, and updates too small to heal anything: only older weights tell."""
    model = small_net(dropout=0.0)
    config = merged(ALONE, {"recovery": {"trust_steps": 4} | more})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    detectors = [says or Says("not-healing", {at: at})]
    guard = steadystep.Guard(model, optimizer, config=config, detectors=detectors)
    outcomes = []
    for i, x in enumerate(batches(at + steps)):
        if i == at and damaged:
            damage(model)
        outcomes.append(guard.step((lambda x=x: squared(model, x)) if given == "closures" else squared(model, x)))
    return outcomes, guard


def went_back(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.restored is not None]


def severities(outcomes: list[Outcome]) -> list[str]:
    return [finding.severity for outcome in outcomes for finding in outcome.findings if finding.severity != "info"]


class TestADetectorOfOnesOwn:
    def test_keeps_the_contract(self) -> None:
        check_detector(LowAccuracy)

    def test_is_heard_saved_and_taken_back(self) -> None:
        model = small_net(dropout=0.0)
        mine = LowAccuracy()
        config = merged(ALONE, {"recovery": {"trust_steps": 4}})
        guard = steadystep.Guard(
            model,
            torch.optim.AdamW(model.parameters()),
            config=config,
            detectors=[mine, Says("weight-jump", {41: 41})],
        )
        for i, x in enumerate(batches(42)):
            if i == 41:
                damage(model)
            outcome = guard.step(lambda x=x: squared(model, x), metrics={"accuracy": 0.9 if i == 38 else 0.3})
            assert [f.what for f in outcome.findings if f.severity == "warn"] == ["accuracy fell"] * (i > 38)
        assert outcome.restored is not None
        assert outcome.plan.to < 38
        assert mine.best == 0.3
        assert guard.state_dict()["detector low-accuracy"] == {"best": 0.3}


def test_poisoned_moments_are_restored_and_the_update_is_taken_with_them() -> None:
    model = small_net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = merged(ALONE, {"recovery": {"trust_steps": 5}})
    guard = steadystep.Guard(model, optimizer, config=config, detectors=[Says("poisoned-moments", {50: 43})])
    data, moments = batches(51), {}
    for i, x in enumerate(data[:50]):
        guard.step(lambda x=x: squared(model, x))
        moments[i] = {n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg_sq"].mul_(1e8)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    outcome = guard.step(lambda: squared(model, data[50]))
    assert outcome.plan.actions == ("restore-moments",)
    clean = max(state.step for state in guard._recovery.states if state.step <= 43)
    assert outcome.plan.to == clean
    assert outcome.stepped
    assert outcome.restored is None
    for name, parameter in model.named_parameters():
        twin, grad = optimizer.state[parameter], parameter.detach() - weights[name]
        assert float(grad.abs().max()) > 0.0  # the weights went on from where they were
        assert float(twin["exp_avg_sq"].max()) < 2.0 * float(moments[clean][name].max()) + 1.0
        assert float(twin["step"]) == clean + 2  # as many as there were, and this one


@pytest.mark.parametrize("given", ["closures", "tensors"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_rollback_restores_what_was_there(given: str, accumulate: int) -> None:
    model = small_net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = {"training": {"gradient_accumulation_steps": accumulate}}
    config = merged(ALONE, training, {"recovery": {"trust_steps": 4}})
    guard = steadystep.Guard(model, optimizer, config=config, detectors=[Says("weight-jump", {30: 28})])
    data, states = batches(40 * accumulate), {}
    for i, x in enumerate(data):
        if i == 30 * accumulate:
            damage(model)
        outcome = guard.step((lambda x=x: squared(model, x)) if given == "closures" else squared(model, x))
        if outcome.pending:
            continue
        if outcome.restored is not None:
            break
        states[i // accumulate] = full_state(model, optimizer)
    assert outcome.step == 30
    assert 0 < outcome.plan.to <= 24
    assert_same(states[outcome.plan.to], full_state(model, optimizer))
    assert guard.updates == outcome.restored == outcome.plan.to + 1
    assert all(p.grad is None for p in model.parameters())
    for x in data[:accumulate]:
        outcome = guard.step((lambda x=x: squared(model, x)) if given == "closures" else squared(model, x))
    assert outcome.stepped


def test_closing_gives_the_memory_back() -> None:
    _, guard = rolling()
    assert guard._recovery.states
    held = [weakref.ref(tensor) for state in guard._recovery.states for tensor in state.tensors.values()]
    guard.close()
    gc.collect()
    assert not guard._recovery.states
    assert all(ref() is None for ref in held)


def test_another_state_loaded_means_other_weights() -> None:
    _, guard = rolling(steps=50)
    guard.load_state_dict(guard.state_dict())
    assert not guard._recovery.states


def test_careful_touches_neither_weights_nor_rate() -> None:
    """Whatever is claimed, it is the plain loop to the bit; only gradients may be refused or made smaller."""
    claims = [
        Says("not-healing", {20: 10}),
        Says("slow-divergence", {25: 10}),
        Says("poisoned-moments", {30: 20}),
        Says("learning-rate-jump", {35: None}, baseline=1e-9),
    ]
    model, plain = small_net(dropout=0.0), small_net(dropout=0.0)
    optimizer, plain_optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    guard = steadystep.Guard(model, optimizer, config=ALONE | {"mode": "careful"}, detectors=claims)
    outcomes = [guard.step(lambda x=x: squared(model, x)) for x in batches(40)]
    assert sum(len(outcome.findings) for outcome in outcomes) == 4
    assert all(outcome.plan.proceeds and outcome.lr_mult == 1.0 for outcome in outcomes)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert len(guard._recovery.states) == 0
    plain_run(plain, plain_optimizer, batches(40))
    assert_same(full_state(plain, plain_optimizer), full_state(model, optimizer))


def test_weights_that_older_ones_do_not_beat_are_kept() -> None:
    """The claim alone is not enough: the same batches under the older weights are no better."""
    outcomes, guard = lasting(damaged=False, steps=60)
    (heard,) = [outcome for outcome in outcomes if outcome.signals.counterfactual is not None]
    counterfactual = heard.signals.counterfactual
    assert counterfactual.batches >= 8
    told = [outcome.loss for outcome in outcomes[AT : AT + counterfactual.batches]]
    assert counterfactual.current_loss == pytest.approx(sum(told) / len(told))
    assert counterfactual.step in [state.step for state in guard._recovery.states]
    assert heard.step == AT + counterfactual.batches - 1
    assert heard.diagnosis.damage == "none"
    assert all(outcome.plan.proceeds for outcome in outcomes)
    assert severities(outcomes) == ["warn"]


def test_a_suspicion_that_older_weights_confirm_is_acted_on() -> None:
    outcomes, _ = lasting()
    (back,) = went_back(outcomes)
    assert AT + 7 <= back.step < AT + 24
    assert severities(outcomes) == ["act"]
    assert all(outcome.stepped for outcome in outcomes if outcome is not back)


@pytest.mark.parametrize("severity", ["info", "warn"])
def test_but_only_where_the_detector_finds_it_grave(severity: str) -> None:
    outcomes, _ = lasting(says=Says("not-healing", {AT: AT}, severity=severity))
    assert not went_back(outcomes)
    assert severities(outcomes) == (["warn"] if severity == "warn" else [])


def test_without_closures_it_is_a_warning_and_nothing_more() -> None:
    outcomes, guard = lasting(at=402, given="tensors")
    assert guard._recovery.states
    assert all(outcome.plan.proceeds and outcome.lr_mult == 1.0 for outcome in outcomes)
    assert severities(outcomes) == ["warn"]


@pytest.mark.parametrize("moves", [True, False])
def test_an_objective_that_moves_is_no_reason_to_go_back(moves: bool) -> None:
    """A target network moves on at every step: the first batch since then has another loss now."""
    model = small_net(dropout=0.0)
    config = merged(ALONE, {"recovery": {"trust_steps": 4}})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    guard = steadystep.Guard(model, optimizer, config=config, detectors=[Says("not-healing", {AT: AT})])
    target, outcomes = [0.0], []

    def loss(x: Tensor) -> Tensor:
        return squared(model, x) + target[0]

    for i, x in enumerate(batches(AT + 40)):
        if i == AT:
            damage(model)
        outcomes.append(guard.step(loss, batch=x))
        target[0] += 0.05 if moves else 0.0
    assert bool(went_back(outcomes)) is not moves
    assert severities(outcomes) == ([] if moves else ["act"])


def test_a_loop_that_updates_by_itself_keeps_its_weights_and_its_rate() -> None:
    model = small_net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = steadystep.Guard(model, optimizer, config=ALONE, detectors=[Says("not-healing", {20: 20})])
    for x in batches(22):
        optimizer.zero_grad()
        loss = squared(model, x)
        loss.backward()
        assert guard.inspect(loss).proceeds
        optimizer.step()
        outcome = guard.commit(stepped=True)
    assert guard.updates == 22
    assert outcome.lr_mult == 1.0
    assert not guard._parts.learning_rate.ceiling.low


def test_a_state_of_damaged_weights_is_no_witness() -> None:
    """The weights are damaged between two steps, and the state taken there has not been trusted yet."""
    outcomes, _ = lasting(at=60)
    (back,) = went_back(outcomes)
    assert back.plan.to <= 56


def test_damage_is_told_by_the_older_weights() -> None:
    outcomes, _ = lasting(rewarm_steps=0)
    (back,) = went_back(outcomes)
    counterfactual = back.signals.counterfactual
    assert counterfactual.old_loss < 0.5 * counterfactual.current_loss
    assert counterfactual.step == back.plan.to < AT
    assert counterfactual.lr == 1e-6


def test_it_goes_back_to_before_the_first_sign() -> None:
    """The weights were damaged ten steps ago, and the states since then are no use, not even as witnesses."""
    model = small_net(dropout=0.0)
    config = merged(ALONE, {"recovery": {"trust_steps": 4}})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)  # heals nothing
    guard = steadystep.Guard(model, optimizer, config=config, detectors=[Says("not-healing", {AT: 52})])
    outcomes = []
    for i, x in enumerate(batches(AT + 30)):
        if i == 53:
            damage(model)
        outcomes.append(guard.step(lambda x=x: squared(model, x)))
    (back,) = went_back(outcomes)
    assert back.signals.counterfactual.step == back.plan.to <= 48


def test_a_state_that_is_in_place_already_is_none_to_go_back_to() -> None:
    states = [SimpleNamespace(step=9, updates=10, lr=0.1, largest_lr=0.1)]
    for updates, goes_back in ((10, False), (11, True)):
        judge = Judge(
            detectors=(),
            steady=(Says("weight-jump", {AT: AT}),),
            budget=Budget(),
            limits=Limits(),
            mode="autopilot",
        )
        signals = Signals(step=AT, loss=2.0, grad_norm=1.0, lr=0.1)
        answers = {"weight-norms": signals, "states": (states, 1.0)}
        verdict = settle(judge.judge(signals, updates=updates), lambda ask, known=answers: known[ask.what])
        assert ("rollback" in verdict.plan.actions) is goes_back


def test_damage_that_comes_back_is_cut_from_the_ceiling() -> None:
    """States under the ceiling can be asked: their learning rate is the one in use, not one before a planned rise."""
    model = small_net(dropout=0.0)
    recovery = {"trust_steps": 4, "rewarm_steps": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    says = Says("not-healing", {AT: AT, 142: 142})
    guard = steadystep.Guard(model, optimizer, config=merged(ALONE, {"recovery": recovery}), detectors=[says])
    outcomes, known = [], {}
    for i, x in enumerate(batches(170)):
        if i in (AT, 142):
            damage(model)
        known[i] = [state.step for state in guard._recovery.states]
        outcomes.append(guard.step(lambda x=x: squared(model, x)))
    first, second = went_back(outcomes)
    assert [first.plan.lr, second.plan.lr] == pytest.approx([0.7e-6, 0.5 * 0.7e-6])
    assert first.plan.to == max(step for step in known[first.step] if step <= AT - 4)
    assert second.plan.to == min(known[second.step])  # nothing as old is left: the oldest there is, not the newest
    assert outcomes[-1].lr_mult == pytest.approx(0.35)


class TestRecoverySettings:
    def test_lr_mult_is_what_a_rollback_leaves_of_the_rate(self) -> None:
        for share in (0.3, 0.9):
            outcomes, _ = lasting(lr_mult=share, rewarm_steps=0)
            (back,) = went_back(outcomes)
            assert back.plan.lr == pytest.approx(share * 1e-6)
            assert outcomes[back.step + 1].lr_mult == pytest.approx(share)
        outcomes, _ = lasting(lr_mult=1.0, rewarm_steps=0)
        assert "cut-lr" not in went_back(outcomes)[0].plan.actions
        assert {outcome.lr_mult for outcome in outcomes} == {1.0}

    def test_rewarm_steps_is_how_long_the_rate_rises(self) -> None:
        outcomes, _ = lasting(lr_mult=0.999, rewarm_steps=4)
        at = went_back(outcomes)[0].step
        rises = [outcome.lr_mult for outcome in outcomes[at + 1 : at + 6]]
        assert rises == pytest.approx([0.1, 0.325, 0.55, 0.775, 0.999], abs=2e-3)
        for never in ({"lr_mult": 0.7, "rewarm_steps": 0}, {"lr_mult": 1.0, "rewarm_steps": 4}):
            outcomes, _ = lasting(**never)
            assert "rewarm" not in went_back(outcomes)[0].plan.actions

    def test_trust_steps_is_how_old_a_state_must_be(self) -> None:
        for trust in (3, 12):
            outcomes, _ = rolling(trust_steps=trust)
            assert AT - 3 * trust <= outcomes[AT].plan.to <= AT - trust

    @pytest.mark.parametrize("skips", [True, False])
    def test_skip_batches_false_gives_the_random_numbers_back(self, skips: bool) -> None:
        model = small_net(dropout=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        config = merged(ALONE, {"recovery": {"trust_steps": 4, "skip_batches": skips}})
        guard = steadystep.Guard(model, optimizer, config=config, detectors=[Says("weight-jump", {22: 22})])
        numbers = {}
        for i, x in enumerate(batches(23)):
            numbers[i] = torch.get_rng_state()
            if i == 22:
                damage(model)
            outcome = guard.step(lambda x=x: squared(model, x))
        assert torch.equal(torch.get_rng_state(), numbers[outcome.plan.to + 1]) is not skips
        assert ("skip-batches" in outcome.plan.actions) is skips

    def test_snapshots_is_how_many_are_kept(self) -> None:
        for count in (1, 2, 5):
            outcomes, guard = rolling(at=99, snapshots=count)
            assert len(guard._recovery.states) == count
        outcomes, guard = rolling(snapshots=0)
        assert not guard._recovery.states
        assert outcomes[AT].restored is None

    def test_snapshot_memory_gb_bounds_them(self) -> None:
        size = 3 * 4 * sum(p.numel() for p in small_net().parameters())
        with pytest.warns(UserWarning, match="1 instead of 4"):
            _, guard = rolling(at=99, snapshot_memory_gb=1.5 * size / 2**30)
        assert len(guard._recovery.states) == 1
        with pytest.warns(UserWarning, match="none is kept"):
            outcomes, guard = rolling(snapshot_memory_gb=1e-9)
        assert not guard._recovery.states
        assert outcomes[AT].plan.proceeds

    def test_snapshot_time_share_has_no_effect_and_says_so(self) -> None:
        with pytest.warns(UserWarning, match=r"snapshot_time_share no longer has an effect") as told:
            _, guard = rolling(at=99, snapshot_time_share=0.9)
        assert len(told) == 1
        _, other = rolling(at=99)
        assert [state.step for state in guard._recovery.states] == [state.step for state in other._recovery.states]

    @pytest.mark.parametrize("count", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4)), 3])
    def test_a_nan_late_in_a_run_goes_back_a_little(self, count: int) -> None:
        """Whatever the number of states: never to the untrained weights."""
        model = small_net(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        guard = steadystep.Guard(model, optimizer, config=merged(ALONE, {"recovery": {"snapshots": count}}))
        went = []
        for i, x in enumerate(batches(1003)):
            if i == 1000:
                with torch.no_grad():
                    model[4].weight[0, 0] = math.nan
            outcome = guard.step(lambda x=x: squared(model, x))
            if outcome.restored is not None:
                went.append(outcome.plan.to)
        assert len(went) == 1
        assert 1000 - 170 <= went[0] <= 1000 - 20
        assert all(bool(p.isfinite().all()) for p in model.parameters())

    def test_auto_recovery_false_keeps_nothing_and_never_goes_back(self) -> None:
        model = small_net(dropout=0.0)
        config = {"training": {"auto_recovery": False, "stability_monitoring": False}}
        guard = steadystep.Guard(
            model, torch.optim.AdamW(model.parameters()), config=config, detectors=[Says("weight-jump", {AT: AT})]
        )
        outcomes = [guard.step(lambda x=x: squared(model, x)) for x in batches(80)]
        assert outcomes[AT].diagnosis.damage == "weights"
        assert all(outcome.plan.proceeds and outcome.lr_mult == 1.0 for outcome in outcomes)
        assert not guard._recovery.states


class Puppet:
    """A loss and a gradient norm exactly as asked for; the weight hardly moves."""

    def __init__(self, **monitoring: Any) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)
        training = monitoring.pop("training", {})
        self.guard = steadystep.Guard(
            self.model, self.optimizer, config={"monitoring": monitoring, "training": training}
        )

    def step(self, *, loss: float = 2.0, norm: float = 2.0, lr: float = 1e-9) -> Outcome:
        self.optimizer.param_groups[0]["lr"] = lr

        def closure() -> Tensor:
            weight = self.model.weight.sum()
            return loss + norm * (weight - weight.detach())

        return self.guard.step(closure)

    def said(self, **view: float) -> set[str]:
        return {finding.detector for finding in self.step(**view).findings}


class TestMonitoringSettings:
    def test_stability_monitoring_false_looks_for_nan_only(self) -> None:
        for monitoring in (True, False):
            puppet = Puppet(training={"stability_monitoring": monitoring})
            for _ in range(60):
                puppet.step()
            assert puppet.step(norm=1e9).stepped is not monitoring
            assert not puppet.step(loss=math.nan).stepped

    def test_explosion_threshold_is_when_a_gradient_is_held_back(self) -> None:
        for threshold, held in ((2.0, True), (10.0, True), (100.0, False)):
            puppet = Puppet(explosion_threshold=threshold)
            for _ in range(128):
                puppet.step()
            outcome = puppet.step(norm=2.0 * 15.0)  # 0.6 times the threshold, twice that for a run so young
            assert (outcome.plan.actions == ("rescale",)) is held
            assert outcome.clipped is held

    def test_gradient_history_size_is_what_a_norm_is_compared_with(self) -> None:
        for size, held in ((32, False), (128, True)):
            puppet = Puppet(gradient_history_size=size)
            for _ in range(300):
                puppet.step()
            for _ in range(20):
                assert puppet.step(norm=5.0).plan.proceeds
            assert ("gradient-spike" in puppet.said(norm=28.0)) is held

    def test_divergence_threshold_is_when_a_loss_is_raised(self) -> None:
        for threshold, noted in ((3.0, True), (8.0, False)):
            puppet = Puppet(divergence_threshold=threshold)
            for i in range(60):
                puppet.step(loss=2.0 + (i % 5 - 2) / 10)
            found = [puppet.said(loss=2.9) for _ in range(6)]
            assert ("loss-spike" in found[0]) is noted
            assert ("not-healing" in found[5]) is noted

    def test_loss_window_size_is_what_a_loss_is_compared_with(self) -> None:
        for size, noted in ((32, False), (128, True)):
            puppet = Puppet(loss_window_size=size)
            for i in range(200):
                puppet.step(loss=2.0 + (i % 5 - 2) / 10)
            for i in range(20):
                assert "loss-spike" not in puppet.said(loss=2.5 + (i % 5 - 2) / 10)
            assert ("loss-spike" in puppet.said(loss=3.8)) is noted

    def test_lr_max_is_a_warning_above(self) -> None:
        for bound, told in ((1e-3, True), (1e-1, False)):
            puppet = Puppet(lr_max=bound)
            puppet.step(lr=9e-4)
            assert puppet.said(lr=2e-3) == ({"learning-rate-bounds"} if told else set())

    def test_lr_min_is_a_warning_below(self) -> None:
        for bound, told in ((1e-3, True), (1e-6, False)):
            puppet = Puppet(lr_min=bound)
            puppet.step(lr=1e-2)
            puppet.step(lr=1e-2)
            assert puppet.said(lr=1e-4) == ({"learning-rate-bounds"} if told else set())


def damaged_twice() -> tuple[list[Any], dict[str, Tensor]]:
    """What was done about two broken weights, what is kept at the end, and every tensor."""
    model = small_net(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = steadystep.Guard(model, optimizer, config={"recovery": {"snapshots": 3}})
    did: list[Any] = []
    for i, x in enumerate(batches(400)):
        if i in (190, 330):
            with torch.no_grad():
                model[4].weight[0, 0] = math.nan
        outcome = guard.step(lambda x=x: squared(model, x))
        did += [(i, outcome.plan)] if outcome.plan.actions else []
    return [*did, [state.step for state in guard._recovery.states]], full_state(model, optimizer)


@pytest.mark.slow
def test_a_busy_machine_decides_as_an_idle_one_does() -> None:
    did, state = damaged_twice()
    hog = "import time\nuntil = time.monotonic() + 30\nwhile time.monotonic() < until: sum(range(10_000))"
    busy = [subprocess.Popen([sys.executable, "-c", hog]) for _ in range(2)]
    try:
        did_under_load, state_under_load = damaged_twice()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert ["rollback" in plan.actions for _, plan in did[:-1]] == [True, True]
    assert did_under_load == did
    assert_same(state_under_load, state)


def test_a_clock_gone_mad_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each clock of the machine says something else at each call: the same states are kept all the same."""

    def kept() -> list[list[int]]:
        model = small_net(dropout=0.0)
        guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), config=ALONE)
        seen = []
        for x in batches(240):
            guard.step(lambda x=x: squared(model, x))
            seen.append([state.step for state in guard._recovery.states])
        return seen

    sane = kept()
    wild = random.Random(0)
    for name in ("perf_counter", "thread_time", "process_time"):
        monkeypatch.setattr(time, name, lambda: wild.uniform(0.0, 1e6))
    assert kept() == sane
