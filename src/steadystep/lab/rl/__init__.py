"""Small RL programs that learn within seconds on a CPU, and ways to collapse them.

A collapse is a change of settings at a step, for a while or for good.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from steadystep.lab.rl.control import ControlProgram, ControlSettings
from steadystep.lab.rl.program import Program
from steadystep.lab.rl.token_programs import TokenProgram, TokenSettings
from steadystep.lab.rl.values import DQN, SAC, ReplaySettings

Make = Callable[[int], Program]

_SORT = {"lr": 6e-3, "wrong": 0.7}
_SUM = {"lr": 5e-3, "wrong": 0.4}
_COPY = {"lr": 6e-3, "wrong": 0.6}
_BANDIT = {"lr": 3e-3, "wrong": 1.0, "warm_steps": 10}
_A2C = {"algorithm": "a2c", "epochs": 1, "minibatches": 1, "horizon": 8, "lr": 2e-3, "critic_lr": 3e-3}
_REINFORCE = {"algorithm": "reinforce", "epochs": 1, "minibatches": 1, "horizon": 8, "lr": 2e-3}


def _tokens(task: str, **settings: Any) -> Make:
    return lambda seed: TokenProgram(task, TokenSettings(**settings), seed)


def _control(environment: str, **settings: Any) -> Make:
    return lambda seed: ControlProgram(environment, ControlSettings(**settings), seed)


def _dqn(environment: str, **settings: Any) -> Make:
    return lambda seed: DQN(environment, ReplaySettings(**settings), seed)


def _sac(**settings: Any) -> Make:
    return lambda seed: SAC(ReplaySettings(**settings), seed)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramInfo:
    """A healthy program that can be made from a seed."""

    name: str
    make: Make
    num_steps: int = 240


def _info(name: str, make: Make, num_steps: int = 240) -> ProgramInfo:
    return ProgramInfo(name=name, make=make, num_steps=num_steps)


PROGRAMS: dict[str, ProgramInfo] = {
    info.name: info
    for info in (
        _info("grpo-sort", _tokens("sort", **_SORT), 290),
        _info("grpo-sum", _tokens("sum", **_SUM)),
        _info("grpo-copy", _tokens("copy", **_COPY)),
        _info("grpo-bandit", _tokens("bandit", **_BANDIT)),
        _info("grpo-epochs-sort", _tokens("sort", **_SORT, epochs=2), 290),
        _info("ppo-sort", _tokens("sort", **_SORT, algorithm="ppo", epochs=2, minibatches=2), 290),
        _info("reinforce-sort", _tokens("sort", **_SORT, algorithm="reinforce"), 290),
        _info("ppo-cart-pole", _control("cart-pole")),
        _info("ppo-grid", _control("grid"), 290),
        _info("a2c-grid", _control("grid", **_A2C)),
        _info("reinforce-cart-pole", _control("cart-pole", **_REINFORCE)),
        _info("dqn-grid", _dqn("grid"), 450),
        _info("dqn-grid-double", _dqn("grid", double=True, target_every=0), 450),
        _info("sac-point", _sac(lr=3e-3), 400),
        # further ones that must stay untouched: other rates, noise, sparse or flat rewards, converging entropy
        _info("grpo-sort-slow", _tokens("sort", lr=1e-3, wrong=0.7)),
        _info("grpo-sort-noise", _tokens("sort", **_SORT, noise=0.5)),
        _info("grpo-sort-bf16", _tokens("sort", **_SORT, sampler="bf16")),
        _info("grpo-sort-kl", _tokens("sort", **_SORT | {"kl": 0.1})),
        _info("grpo-sum-sparse", _tokens("sum", lr=2e-3, wrong=0.9)),
        _info("grpo-gpt-sort", _tokens("sort", lr=2e-3, wrong=0.7, policy="gpt", num_prompts=4, group=6), 160),
        _info("ppo-bandit", _tokens("bandit", **_BANDIT, algorithm="ppo", epochs=2)),
        _info("reinforce-bandit", _tokens("bandit", **_BANDIT, algorithm="reinforce", entropy=0.02)),
        _info("ppo-cart-pole-epochs", _control("cart-pole", epochs=4, minibatches=4), 320),
        _info("ppo-grid-noise", _control("grid", noise=0.3)),
        _info("a2c-cart-pole", _control("cart-pole", **_A2C)),
        _info("reinforce-grid", _control("grid", **_REINFORCE | {"entropy": 0.0})),
        _info("dqn-cart-pole", _dqn("cart-pole", lr=3e-3), 450),
        _info("sac-point-slow", _sac(lr=1e-3), 400),
    )
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """Settings that change at a step of a program, and the causes that name it right."""

    name: str
    program: str
    changes: Mapping[str, Any]
    causes: tuple[str, ...]
    start: int = 220
    lasts: int = 0
    """Steps after which the changes are taken back; 0 for good."""

    def first_step(self, seed: int) -> int:
        """Return the step of the change: up to 12 later, by the seed."""
        return self.start + 4 * (seed % 4)


_MISMATCH, _HACKING = ("policy-mismatch",), ("reward-hacking",)
_RATE = ("learning-rate-too-high", "schedule-error", "policy-collapse", "ratio-explosion", "policy-drift")
_ADVANTAGES = (
    *("policy-collapse", "policy-drift", "ratio-explosion", "exploding-gradient", "value-divergence"),
    "bad-advantages",  # newer than the rest: `lab.bench.rl` counts with it and without
)
_VALUES = ("value-divergence", "policy-collapse")
_NAN = ("bad-batch", "non-finite-loss", "metric-out-of-bounds", "non-finite-input")


def _of(
    name: str, program: str, causes: tuple[str, ...], *, start: int = 220, lasts: int = 0, **changes: Any
) -> Collapse:
    return Collapse(name=name, program=program, changes=changes, causes=causes, start=start, lasts=lasts)


COLLAPSES: dict[str, Collapse] = {
    c.name: c
    for c in (
        _of("int2 sampler", "grpo-sort", _MISMATCH, sampler="int2"),
        _of("base sampler", "grpo-sort", _MISMATCH, sampler="reference"),
        _of("base sampler, epochs", "grpo-epochs-sort", _MISMATCH, sampler="reference"),
        _of("int2 sampler, reinforce", "reinforce-sort", _MISMATCH, sampler="int2"),
        _of("stale sampler", "grpo-sort", _MISMATCH, sampler="stale", kl=0.0),
        _of("stale sampler, epochs", "grpo-epochs-sort", _MISMATCH, start=190, sampler="stale", kl=0.0, epochs=4),
        _of("proxy reward", "grpo-sort", _HACKING, exploit=0.7, kl=0.0),
        _of("proxy reward, grid", "ppo-grid", _HACKING, exploit=0.9),
        _of("reward per token", "grpo-sort", _HACKING, per_token=0.4),
        _of("reward per token, ppo", "ppo-sort", _HACKING, per_token=0.4),
        _of("LR x30", "grpo-sort", _RATE, lr_mult=30.0),
        _of("LR x100, ppo", "ppo-grid", _RATE, lr_mult=100.0),
        _of("LR x30, sac", "sac-point", _RATE, start=310, lr_mult=30.0),
        _of("LR x30, dqn", "dqn-grid-double", _RATE, start=350, lr_mult=30.0),
        _of("entropy penalty", "grpo-sort", ("entropy-collapse",), start=8, entropy=-1.5),
        _of("entropy penalty, grid", "ppo-grid", ("entropy-collapse",), start=8, entropy=-2.0),
        _of("entropy bonus", "grpo-sort", ("policy-collapse", "policy-drift"), entropy=2.0),
        _of("wrong sign", "grpo-sort", _ADVANTAGES, lasts=40, advantage_mult=-1.0),
        _of("wrong sign, ppo", "ppo-grid", _ADVANTAGES, lasts=60, advantage_mult=-1.0),
        _of("wrong sign, a2c", "a2c-grid", _ADVANTAGES, start=150, lasts=40, advantage_mult=-1.0),
        _of("advantage outliers", "ppo-cart-pole", _ADVANTAGES, start=150, outliers=0.02),
        _of("stale values", "a2c-grid", _VALUES, start=150, stale_values=True),
        _of(
            "epochs x40, no clip",
            "grpo-epochs-sort",
            ("ratio-explosion", "policy-drift"),
            start=60,
            epochs=40,
            clip=1e6,
        ),
        _of(
            "epochs x20, no clip, ppo",
            "ppo-cart-pole",
            ("ratio-explosion", "policy-drift"),
            start=150,
            epochs=20,
            clip=1e6,
        ),
        _of("equal rewards", "grpo-sort", ("dead-groups", "policy-collapse"), constant=True),
        _of("NaN rewards", "grpo-sort", _NAN, broken=0.02),
        _of("infinite rewards", "ppo-cart-pole", _NAN, start=150, broken=0.01, broken_by=math.inf),
        _of("NaN rewards, dqn", "dqn-grid-double", _NAN, start=350, broken=0.01),
        _of("no target network", "dqn-grid-double", _VALUES, start=350, online_target=True),
        _of("no target network, sac", "sac-point", _VALUES, start=310, online_target=True),
        _of("wrong sign, sac", "sac-point", _ADVANTAGES, start=310, actor_sign=-1.0),
    )
}
