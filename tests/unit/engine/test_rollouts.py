"""A policy that is led astray: rolled back where rollouts prove it, otherwise only warned about."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import steadystep
from steadystep.engine.policy_watch import GraderWatch
from steadystep.engine.rollouts import PolicyTrial
from steadystep.engine.verdict import Ask, Verdict
from steadystep.errors import MisuseError
from steadystep.records import Finding, Plan, Signals
from steadystep.rl import Controls
from steadystep.rl.earned_series import EarnedSeries

GOOD = 2
ARMS = 8


def policy_run(mode: str, *, evaluate: bool, astray: range = range(0), raises: bool = False) -> dict[str, Any]:
    """REINFORCE on eight arms, one of which pays; while `astray`, all others do. Ends with what it earns."""
    torch.manual_seed(0)
    model = nn.Linear(1, ARMS, bias=False)
    critic = nn.Linear(1, 1)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.01)]
    both = nn.ModuleList([model, critic])

    def share() -> Tensor:
        return model(torch.ones(1, 1)).softmax(-1)[0, GOOD]

    def play() -> float:
        if raises:
            raise RuntimeError("no environment")
        torch.rand(3), random.random()  # draws that must leave no trace
        return float((torch.rand(64) < share()).float().mean())

    changes: list[Any] = []
    controls = Controls(
        evaluate=play if evaluate else None, kl_coef=0.1, on_change=lambda *change: changes.append(change)
    )
    outcomes = []
    with steadystep.Guard(both, optimizers, config={"mode": mode}) as guard:
        guard.keep("policy", controls)
        for step in range(150):
            with torch.no_grad():
                actions = model(torch.ones(64, 1)).softmax(-1).multinomial(1).squeeze(1)
                rewards = ((actions == GOOD) != (step in astray)).float()

            def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
                logs = model(torch.ones(64, 1)).log_softmax(-1)
                logp, bonus = logs.gather(1, batch[0][:, None]).squeeze(1), -(logs.exp() * logs).sum(-1).mean()
                value = critic(torch.ones(64, 1)).squeeze(1)
                return -(logp * (batch[1] - value.detach())).mean() + (value - batch[1]).square().mean() - 0.2 * bonus

            outcomes.append(guard.step(loss, batch=(actions, rewards), metrics={"reward": rewards.mean()}))
    weights = [parameter.detach().clone() for parameter in both.parameters()]
    done = [(o.step, o.plan) for o in outcomes if o.plan.actions]
    return {"earned": float(share().detach()), "done": done, "outcomes": outcomes, "w": weights, "changes": changes}


def test_a_healthy_run_is_bit_identical_with_controls() -> None:
    plain, guarded = policy_run("observe", evaluate=False), policy_run("autopilot", evaluate=True)
    assert guarded["done"] == []
    assert guarded["changes"] == []
    assert all(torch.equal(a, b) for a, b in zip(plain["w"], guarded["w"], strict=True))


def test_rolled_back_where_rollouts_prove_it_and_only_warned_otherwise() -> None:
    astray = range(90, 150)
    plain = policy_run("observe", evaluate=True, astray=astray)
    guarded = policy_run("autopilot", evaluate=True, astray=astray)
    warned = policy_run("autopilot", evaluate=False, astray=astray)
    assert guarded["earned"] > 0.5 > 0.2 > plain["earned"]
    step, plan = next((step, plan) for step, plan in guarded["done"] if "rollback" in plan.actions)
    assert plan.to < 90 < step
    assert {"cut-lr", "raise-coefficient"} <= set(plan.actions)
    evidence = guarded["outcomes"][step].diagnosis.evidence
    assert "8 rollouts earn" in evidence
    assert not any("rollback" in plan.actions for _, plan in warned["done"])
    assert [plan.actions for _, plan in warned["done"]] == [("raise-coefficient",)] * len(warned["done"])
    assert warned["changes"][0] == ("kl_coef", 0.2)
    assert plain["done"] == []


@pytest.mark.parametrize("mode", ["observe", "careful"])
def test_other_modes_never_roll_back(mode: str) -> None:
    assert not any("rollback" in p.actions for _, p in policy_run(mode, evaluate=True, astray=range(90, 150))["done"])


def test_rollouts_that_raise_are_no_proof() -> None:
    done = policy_run("autopilot", evaluate=True, astray=range(90, 150), raises=True)["done"]
    assert not any("rollback" in plan.actions for _, plan in done)


@dataclass(frozen=True)
class KeptState:
    """A state of the ring, as far as a trial asks for it."""

    step: int
    lr: float = 0.1
    second_moment: float | None = None
    largest_lr: float = 0.1

    @property
    def updates(self) -> int:
        return self.step + 1


def lived(
    level: Callable[[int], float],
    *,
    steps: int = 200,
    mode: Any = "autopilot",
    notes: dict[int, Finding | tuple[Finding, ...]] | None = None,
    metrics: dict[str, float] | Callable[[int], dict[str, float]] | None = None,
    every: int = 5,
) -> tuple[list[Finding], list[Ask], Controls]:
    """Drive a trial through a run whose policy earns `level(step)`: all findings, all questions, its controls."""
    trial, controls = PolicyTrial(), Controls(evaluate=lambda: 0.0, every=every)
    trial.controls, asked, said = controls, list[Ask](), list[Finding]()
    for step in range(steps):
        states = [KeptState(at) for at in range(19, step, 20)]
        note = (notes or {}).get(step, ())
        found = note if isinstance(note, tuple) else (note,)
        told = metrics(step) if callable(metrics) else metrics or {"entropy": 1.0}
        signals = Signals(step=step, loss=0.0, grad_norm=1.0, metrics=told)
        trial.hear(signals)
        if not found and step < trial.due:
            continue
        playing = trial.play(signals, found, states, mode)
        answer: Any = None
        try:
            while True:
                ask = playing.send(answer)
                asked.append(ask)
                noise = [0.002 * ((7 * i + ask.count) % 3) for i in range(ask.rollouts)]
                worth = [level(step), *(level(state.step + 1) for state in ask.states)]
                answer = [[each + n for n in noise] for each in worth] if ask.what == "scores" else None
        except StopIteration as end:
            said += [finding for finding in end.value[1] if finding.severity != "info"]
    return said, asked, controls


def falls(at: int, *, by: float = 0.1, until: int = 10_000) -> Callable[[int], float]:
    """Learns to 0.9 within 100 steps; from `at` to `until` it loses `by` per step."""
    return lambda step: min(0.1 + 0.008 * step, 0.9) if step < at or step >= until else max(0.9 - by * (step - at), 0.0)


def rises(at: int) -> Callable[[int], dict[str, float]]:
    """The entropy doubles at that step."""
    return lambda step: {"entropy": 1.0 if step < at else 2.0}


def test_a_healthy_policy_costs_one_rollout_every_five_steps() -> None:
    said, asked, controls = lived(falls(10_000))
    assert said == []
    assert sum(ask.rollouts for ask in asked if ask.what == "scores") == 40 == len(controls.looks)
    assert lived(falls(10_000), every=0)[1] == []


def test_a_fall_is_said_and_then_undone_to_the_best_state() -> None:
    said, _, _ = lived(falls(150))
    assert [f.severity for f in said[:1]] == ["act"]
    assert 170 <= said[0].step <= 176
    assert "8 rollouts earn" in said[0].what
    observed, _, _ = lived(falls(150), mode="observe")
    assert [f.severity for f in observed] == ["warn"]


def test_a_fall_after_the_entropy_has_risen_is_said_and_undone_sooner() -> None:
    said, _, _ = lived(falls(150), metrics=rises(150))
    assert [f.severity for f in said[:2]] == ["warn", "act"]
    assert said[0].step <= 155 < 160 <= said[1].step <= 166
    looks = [at for at, _ in lived(falls(150), metrics=rises(150), mode="observe")[2].looks if at >= 150]
    assert looks[:4] == [150, 151, 152, 153]  # at once, then at every step
    assert lived(falls(10_000), metrics=rises(150))[0] == []


def test_a_dip_without_a_cause_is_not_said_for_twenty_steps() -> None:
    assert lived(falls(150, until=168))[0] == []
    assert [f.severity for f in lived(falls(150, until=168), metrics=rises(150))[0]][:1] == ["warn"]


@pytest.mark.parametrize(("at", "lasts", "acts"), [(105, 100, 0), (112, 100, 0), (155, 40, 1), (105, 130, 1)])
def test_a_policy_that_still_learns_may_fall(at: int, lasts: int, acts: int) -> None:
    """It reaches its best level at step 100: eight looks later it has come to rest, or has been down for as long."""
    said, _, _ = lived(falls(at), steps=at + lasts)
    assert sum(f.severity == "act" for f in said) >= acts
    assert bool(said) == bool(acts)


@pytest.mark.parametrize(("deepest", "said"), [(0.0, True), (0.2, True), (0.5, False)])
def test_a_policy_that_has_dipped_by_itself_may_dip_again(deepest: float, said: bool) -> None:
    def level(step: int) -> float:
        return 0.9 - deepest if 120 <= step < 140 else 0.3 if step >= 250 else falls(10_000)(step)

    found, _, _ = lived(level, steps=300)
    assert bool([f for f in found if f.step >= 250]) == said


@pytest.mark.parametrize(("again", "said"), [(400, True), (1_000, False)])
def test_a_fall_that_was_said_is_a_usual_dip_only_much_later(again: int, said: bool) -> None:
    def level(step: int) -> float:
        return 0.0 if 300 <= step < 324 or again <= step < again + 24 else falls(10_000)(step)

    found, _, _ = lived(level, steps=again + 50, mode="observe")
    assert [f.step < 324 for f in found[:1]] == [True]
    assert bool([f for f in found if f.step >= again]) == said


def test_a_fall_that_rises_again_is_not_said() -> None:
    def level(step: int) -> float:
        return falls(10_000)(step) if step < 150 else min(0.4 + 0.02 * (step - 150), 0.9)

    assert lived(level)[0] == []
    assert lived(lambda step: 0.4 if step >= 150 else level(step))[0] != []


MISMATCH = Finding(detector="policy-mismatch", step=140, severity="warn", value=1.0, limit=0.1, what="they disagree")


@pytest.mark.parametrize(("caused", "acts"), [(True, 1), (False, 0)])
def test_less_than_half_of_the_gain_is_undone_only_with_a_cause(caused: bool, acts: int) -> None:
    notes = {140: MISMATCH} if caused else {}
    said, _, _ = lived(lambda step: 0.62 if step >= 150 else falls(10_000)(step), notes=notes, steps=180)
    lost = [f for f in said if f.detector == "reward-collapse"]
    assert [f.severity for f in lost][:2] == ["warn"] + ["act"] * acts
    assert {f.where for f in lost} == ({("policy-mismatch",)} if caused else {()})


def test_after_a_cause_looks_are_closer_for_a_while() -> None:
    looks = [at for at, _ in lived(falls(10_000), notes={140: MISMATCH}, steps=300)[2].looks]
    gaps = {at: after - at for at, after in pairwise(looks)}
    assert {gap for at, gap in gaps.items() if 140 <= at < 152} == {1}
    assert {gap for at, gap in gaps.items() if 155 <= at < 195} == {2}
    assert {gap for at, gap in gaps.items() if at < 135 or at > 205} == {5}


@pytest.mark.parametrize("level", [0.0, 0.4, 0.55])
def test_a_fall_is_said_after_twenty_steps_or_at_once_where_the_entropy_has_risen(level: float) -> None:
    """However deep it is: healthy policies fall by most of what they had gained."""
    deep = lambda step: falls(10_000)(step) if step < 150 else level  # noqa: E731
    assert lived(deep, steps=180)[0][0].step == 170
    assert lived(deep, metrics=rises(148), steps=180)[0][0].step == 150


def test_a_rise_of_the_entropy_shortens_the_wait_and_does_not_make_a_dip_a_fall() -> None:
    slight = lambda step: falls(10_000)(step) if step < 150 else 0.72  # noqa: E731
    assert lived(slight, steps=200)[0] == []
    assert lived(slight, metrics=rises(148), steps=200)[0] == []


@pytest.mark.parametrize("until", [154, 157])
def test_a_dip_that_heals_is_not_undone(until: int) -> None:
    assert not any(f.severity == "act" for f in lived(falls(150, until=until))[0])


def test_values_without_a_policy_are_given_time() -> None:
    values = {"value_loss": 1.0, "value_mean": 1.0}
    assert lived(falls(150, until=185), metrics=values, steps=300)[0] == []
    assert [f.severity for f in lived(falls(150), metrics=values, steps=210)[0]][:1] == ["act"]


@pytest.mark.parametrize(("outlived", "told"), [(False, True), (True, False)])
def test_a_cause_counts_until_the_policy_earns_more_than_ever(outlived: bool, told: bool) -> None:
    """A dip of a quarter at step 260 is said where a cause was named at 120, and nothing new was learned since."""
    cause = Finding(detector="kl-blow-up", step=120, severity="warn", value=0.1, limit=0.5, what="drift")
    learned = lambda step: min(0.1 + 0.008 * step, 0.9) + (0.1 if outlived and step >= 200 else 0.0)  # noqa: E731
    dips = lambda step: learned(step) * (0.75 if step >= 260 else 1.0)  # noqa: E731
    said = lived(dips, notes={120: cause}, steps=300)[0]
    assert any(f.detector == "reward-collapse" for f in said) == told


def test_values_that_were_lucky_once_are_left_alone() -> None:
    """Greedy values that earned much after some updates and nothing since: they had never come to rest."""
    values = {"value_loss": 1.0, "value_mean": 1.0}
    lucky = lambda step: 0.0 if step < 35 or step >= 60 else 0.8  # noqa: E731
    assert not any(f.severity == "act" for f in lived(lucky, metrics=values, steps=300)[0])
    assert any(f.severity == "act" for f in lived(lucky, steps=300)[0])


def test_a_warning_before_rollouts_know_anything_is_a_note() -> None:
    loud = Finding(detector="reward-collapse", step=12, severity="warn", value=0.1, limit=0.5, what="fell")
    assert lived(falls(10_000), notes={12: loud}, steps=40)[0] == []


@pytest.mark.parametrize(("rests", "waits"), [(True, 20), (False, 40)])
def test_values_that_never_fell_are_judged_as_a_policy(rests: bool, waits: int) -> None:
    """After 30 looks at rest a fall is undone after 20 steps, otherwise after 40."""
    values = {"value_loss": 1.0, "value_mean": 1.0}
    at = 330 if rests else 200
    said = lived(falls(at, by=1.0), metrics=values, steps=at + 60)[0]
    assert [(f.severity, waits <= f.step - at <= waits + 6) for f in said[:1]] == [("act", True)]


def test_a_dip_of_two_looks_from_rest_is_not_said() -> None:
    values = {"value_loss": 1.0, "value_mean": 1.0}
    assert lived(falls(300, by=1.0, until=307), metrics=values, steps=360)[0] == []


def test_a_warning_of_the_reward_that_rollouts_do_not_show_is_a_note() -> None:
    loud = Finding(detector="reward-collapse", step=150, severity="warn", value=0.1, limit=0.5, what="fell")
    assert lived(falls(10_000), notes={150: loud})[0] == []


@pytest.mark.parametrize(("moves", "named"), [(False, ["reward-hacking"]), (True, [])])
def test_a_reward_that_jumps_without_the_policy_is_the_grader(moves: bool, named: list[str]) -> None:
    jump = Finding(
        detector="reward-hacking", step=150, severity="info", value=2.0, limit=0.2, what="jumped", where=("reward",)
    )
    level = (lambda step: 0.1 if step < 60 else 0.5 if step < 148 else 0.9) if moves else falls(10_000)
    said, _, _ = lived(level, notes={150: jump})
    assert [f.detector for f in said] == named


@pytest.mark.parametrize("step", [150, 151])
def test_a_jump_is_looked_at_beside_a_note_that_repeats_and_right_after_a_look(step: int) -> None:
    note = Finding(detector="reward-collapse", step=step, severity="info", value=0.1, limit=0.5, what="fell")
    jump = replace(note, detector="reward-hacking", where=("reward",))
    assert [f.detector for f in lived(falls(10_000), notes={step: (note, jump)})[0]] == ["reward-hacking"]


def test_rollouts_too_noisy_to_tell_do_not_accuse_the_grader() -> None:
    """A policy that has learned little moves by less than one look can show."""
    scores = [0.23, 0.28, 0.29, 0.23, 0.24, 0.33, 0.41, 0.46]  # of a healthy A2C on a cart-pole
    series = EarnedSeries([*([5.0 * i, score] for i, score in enumerate(scores)), [36.0, 0.46]])
    jump = Finding(
        detector="reward-hacking",
        step=36,
        severity="info",
        value=0.37,
        limit=0.08,
        what="",
        where=("reward",),
        since=28,
    )
    assert series.known
    assert GraderWatch().changed(jump, series).severity == "info"


def test_after_a_rollback_a_tenth_of_the_gain_is_enough() -> None:
    def again(step: int) -> float:
        return falls(150, until=180)(step) if step < 195 else 0.7

    said, _, _ = lived(again)
    assert [f.severity for f in said if f.step < 180][:1] == ["act"]
    assert [f.severity for f in said if f.step >= 195][:1] == ["act"]
    assert [f.severity for f in lived(lambda step: again(step) if step > 180 else falls(10_000)(step))[0]] == []


def test_what_was_earned_survives_a_checkpoint_and_no_rollback_unsees_it() -> None:
    _, _, controls = lived(falls(10_000))
    early, late = Controls(evaluate=lambda: 0.0), controls.state_dict()
    early.load_state_dict(late)
    assert early.looks == controls.looks
    controls.load_state_dict(late | {"looks": late["looks"][:3]})
    assert len(controls.looks) == 40
    with pytest.raises(MisuseError, match="every"):
        Controls(every=-1)


@given(st.lists(st.floats(-10.0, 10.0), min_size=6, max_size=30), st.floats(-5.0, 5.0), st.floats(0.1, 10.0))
def test_a_fall_does_not_depend_on_scale_and_offset(scores: list[float], offset: float, scale: float) -> None:
    one = EarnedSeries([[5.0 * i, score] for i, score in enumerate(scores)])
    other = EarnedSeries([[5.0 * i, scale * score + offset] for i, score in enumerate(scores)])
    now = [scores[-1] - 3.0 - 0.1 * i for i in range(8)]
    assert other.fall([scale * score + offset for score in now], 0.3) == pytest.approx(one.fall(now, 0.3), abs=1e-3)
    assert one.best <= max(scores)
    assert other.usual_dip(60) == pytest.approx(scale * one.usual_dip(60), abs=1e-6 * scale)
    assert one.usual_dip(60) <= one.usual_dip(90) <= 1.5 * (max(scores) - min(scores)) + 1e-9


@given(st.lists(st.floats(0.0, 1.0), min_size=8, max_size=30))
def test_who_only_rises_has_no_dips_and_rests_no_longer_than_it_lived(scores: list[float]) -> None:
    series = EarnedSeries([[5.0 * i, score] for i, score in enumerate(sorted(scores))])
    since = 5 * len(scores)
    assert series.usual_dip(since) <= 1e-12
    assert 0 <= series.rest(since) <= sum(at <= since - 10 for at, _ in series.looks)
    assert series.patience(since) in (0, since)


def ended(*actions: Any, mode: Any = "autopilot", now: float = 0.5, best: float = 0.9) -> Plan:
    """The plan for a stop of a policy that earns `now`, and whose state at step 59 earned `best`."""
    trial, controls = PolicyTrial(), Controls(evaluate=lambda: 0.0)
    for step in range(0, 100, 5):
        controls.add_look(step, best if 55 <= step <= 65 else 0.5)
    trial.controls = controls
    verdict = Verdict(Signals(step=100, loss=float("nan"), grad_norm=1.0), plan=Plan(actions=actions))
    ending, answer = trial.end(verdict, [KeptState(19), KeptState(59), KeptState(99)], mode), None
    try:
        while True:
            ask = ending.send(answer)
            assert [state.step for state in ask.states] == [59]
            answer = [[worth + 0.001 * i for i in range(ask.rollouts)] for worth in (now, best)]
    except StopIteration as end:
        plan: Plan = end.value.plan
        return plan


def test_a_stop_puts_the_best_policy_in_place_where_rollouts_prove_it() -> None:
    found = ended("skip-step", "stop")
    assert (found.actions, found.to) == (("rollback", "stop"), 59)
    assert ended("skip-step", "stop", now=0.9).actions == ("skip-step", "stop")
    assert ended("skip-step").actions == ("skip-step",)
    assert ended("rollback", "stop").to is None
    assert ended("skip-step", "stop", mode="careful").actions == ("skip-step", "stop")
    never_played = PolicyTrial()
    verdict = Verdict(Signals(step=100, loss=0.0, grad_norm=1.0), plan=Plan(actions=("stop",)))
    with pytest.raises(StopIteration):
        never_played.end(verdict, [KeptState(59)], "autopilot").send(None)
