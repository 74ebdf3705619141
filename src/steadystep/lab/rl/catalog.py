"""The healthy programs, and the ways to collapse them: settings that change at a step, for a while or for good."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from steadystep.lab.rl.control import ControlProgram, ControlSettings
from steadystep.lab.rl.program import Program
from steadystep.lab.rl.token_programs import TokenProgram, TokenSettings
from steadystep.lab.rl.values import DQN, SAC, ReplaySettings

Make = Callable[[int], Program]

_SORT = {"lr": 4e-3, "wrong": 0.8}
_SUM = {"lr": 5e-3, "wrong": 0.4}
_COPY = {"lr": 5e-3, "wrong": 0.7}
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
    num_steps: int = 400


def _info(name: str, make: Make, num_steps: int = 400) -> ProgramInfo:
    return ProgramInfo(name=name, make=make, num_steps=num_steps)


PROGRAMS: dict[str, ProgramInfo] = {
    info.name: info
    for info in (
        _info("grpo-sort", _tokens("sort", **_SORT)),
        _info("grpo-sum", _tokens("sum", **_SUM)),
        _info("grpo-copy", _tokens("copy", **_COPY)),
        _info("grpo-bandit", _tokens("bandit", **_BANDIT)),
        _info("grpo-epochs-sort", _tokens("sort", **_SORT, epochs=2, minibatches=2)),
        _info("ppo-sort", _tokens("sort", **_SORT, algorithm="ppo", epochs=2, minibatches=2)),
        _info("reinforce-sort", _tokens("sort", **_SORT, algorithm="reinforce")),
        _info("ppo-cart-pole", _control("cart-pole")),
        _info("ppo-grid", _control("grid")),
        _info("a2c-grid", _control("grid", **_A2C)),
        _info("reinforce-cart-pole", _control("cart-pole", **_REINFORCE)),
        _info("dqn-grid", _dqn("grid"), 500),
        _info("sac-point", _sac(lr=3e-3), 500),
    )
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """Settings that change at a step of a program, and the cause that should be named."""

    name: str
    program: str
    changes: Mapping[str, Any]
    start: int = 200
    lasts: int = 0
    """Steps after which the changes are taken back; 0 for good."""
    causes: tuple[str, ...] = ()
    back: Mapping[str, Any] = field(default_factory=dict)
