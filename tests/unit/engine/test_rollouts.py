"""A policy that is led astray: rolled back where rollouts prove it, otherwise only warned about."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.engine.rollouts import earns_more
from steadystep.rl import Controls

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
def test_other_modes_never_play(mode: str) -> None:
    assert not any("rollback" in p.actions for _, p in policy_run(mode, evaluate=True, astray=range(90, 150))["done"])


def test_rollouts_that_raise_are_no_proof() -> None:
    done = policy_run("autopilot", evaluate=True, astray=range(90, 150), raises=True)["done"]
    assert not any("rollback" in plan.actions for _, plan in done)


def test_equal_and_uncertain_scores_prove_nothing() -> None:
    assert not earns_more([1.0] * 8, [1.0] * 8)
    assert not earns_more([0.0] * 8, [1.0] * 8)
    assert earns_more([1.0] * 8, [0.5] * 8)
    assert not earns_more([9.0, *[0.5] * 7], [0.5] * 8)
