"""How often the gradient norm is above the limit it is clipped to."""

import math
from typing import Any, final

from steadystep.detectors.metrics import words
from steadystep.errors import ConfigError
from steadystep.records import Finding, Severity, Signals

_NOTHING: tuple[Finding, ...] = ()
_BLOCK = 100
_BLOCKS = 5
_OFTEN = 0.1
_MOSTLY = 0.5
_FAR = 10.0
_SETTLED_BLOCKS = 10  # the first 1000 steps are often clipped in a healthy run,
_FIRST_BLOCKS = 2  # but not by so much that nearly
_ALL = 0.95  # of the first 200 are
_MUCH = 5.0  # times the limit, and most of them ten times
_EARLY_BLOCKS = 5  # in which a falling loss is a supervised one; later the returns of a policy may have settled
_GROWN = 2.0  # times the first block's norms: returns grow, and with them the loss and the gradients of a policy
_HUGE = 1e100
_POLICY = frozenset({"actor", "critic", "policy", "kl", "entropy", "reward", "rewards", "advantage", "vf", "rollout"})


@final
class ClipRate:
    """Notes when more than a tenth of 100 steps were clipped; warns when clipping sets the size of the steps.

    It stays a note even if all steps are clipped: Adam divides by the size of the gradient, and a byte-level GPT
    clipped to half its norm on nine of ten steps ends where it does without. A warning, once in a run, where most
    gradients are cut to less than a tenth from the first step on: after 200 steps if hardly one of them was cut to more
    than a fifth, else after 1000. Gradients that grow later, as those of a policy with its returns, are not the limit's
    fault.

    Args:
        max_norm: the clipping limit.
        quiet_steps: steps between two notes.
        scale_free: the optimizer divides by the size of the gradient: a note instead of the warning, as PPO is clipped
            twentyfold by custom.
    """

    name = "clip-rate"

    def __init__(self, max_norm: float, *, quiet_steps: int = 5000, scale_free: bool = False) -> None:
        if not max_norm > 0.0:
            raise ConfigError(f"max_norm must be above 0, got {max_norm}")
        self._max_norm = max_norm
        self._scale_free = scale_free
        self._quiet_blocks = max(1, quiet_steps // _BLOCK)
        self._steps = 0
        self._clipped = 0
        self._much = 0
        self._far = 0
        self._blocks = 0
        self._always = True  # most norms of every block so far were far above
        self._nearly_all = True  # and nearly all much
        self._recent: list[int] = []  # of the last blocks, how many norms were far above
        self._rest = 0
        self._said = ""  # the gravest that was said of steps whose size the clip sets
        self._block = _Block()
        self._first = _Block()

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding every 100 steps; non-finite norms do not count."""
        norm = signals.grad_norm
        if norm > self._max_norm:
            if norm == math.inf:
                return _NOTHING
            self._clipped += 1
            self._much += norm > _MUCH * self._max_norm
            self._far += norm > _FAR * self._max_norm
        elif norm != norm:
            return _NOTHING
        self._steps += 1
        self._block.add(signals.loss, norm)
        return self._judge(signals) if self._steps == _BLOCK else _NOTHING

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        clipped = self._clipped
        self._recent = [*self._recent[1 - _BLOCKS :], self._far]
        self._always = self._always and self._far > _MOSTLY * _BLOCK
        self._nearly_all = self._nearly_all and self._much >= _ALL * _BLOCK
        self._steps = self._clipped = self._much = self._far = 0
        self._blocks += 1
        self._rest = max(0, self._rest - 1)
        block, self._block = self._block, _Block()
        self._first = self._first if self._first.count else block
        early = self._blocks <= _EARLY_BLOCKS
        falls = early and block.improves_on(self._first) and not _is_policy(signals)
        far = self._far_above(signals, minds=falls or not self._scale_free)
        if far:
            return far
        if clipped > _OFTEN * _BLOCK and not self._rest:
            self._rest = self._quiet_blocks
            what = f"{clipped} of the last {_BLOCK} gradient norms exceeded max_norm = {self._max_norm:g}"
            return (self._finding(signals, "info", clipped / _BLOCK, _OFTEN, what),)
        return _NOTHING

    def _far_above(self, signals: Signals, *, minds: bool) -> tuple[Finding, ...]:
        """Most gradients were cut to less than a tenth since the first step: a warning for a run that `minds`."""
        due = self._blocks >= (_FIRST_BLOCKS if self._nearly_all else _SETTLED_BLOCKS)
        severity: Severity = "warn" if minds else "info"
        if not (self._always and due) or self._said in ("warn", severity):
            return _NOTHING
        self._said = severity
        far = sum(self._recent) / (_BLOCK * len(self._recent))
        what = f"{far:.0%} of the last {_BLOCK * len(self._recent)} gradient norms were more than {_FAR:g} times"
        what += f" max_norm = {self._max_norm:g}"
        if not self._scale_free:
            what += ": the clip limit, not the learning rate, sets the step size"
        elif minds:
            what += ": large and small gradients have the same effect"
        return (self._finding(signals, severity, far, _MOSTLY, what),)

    def _finding(self, signals: Signals, severity: Severity, value: float, limit: float, what: str) -> Finding:
        return Finding(detector=self.name, step=signals.step, severity=severity, value=value, limit=limit, what=what)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "steps": self._steps,
            "clipped": self._clipped,
            "much": self._much,
            "far": self._far,
            "since_the_start": [self._always, self._nearly_all],
            "blocks": self._blocks,
            "recent": list(self._recent),
            "rest": self._rest,
            "warned": bool(self._said),
            "said": self._said,
            "levels": [self._block.state(), self._first.state()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._steps, self._clipped, self._far = int(state["steps"]), int(state["clipped"]), int(state["far"])
        self._blocks, self._rest = int(state["blocks"]), int(state["rest"])
        self._said = str(state.get("said", "warn" if state["warned"] else ""))
        self._recent = [int(count) for count in state["recent"]]
        self._much = int(state.get("much", 0))
        self._always, self._nearly_all = (bool(flag) for flag in state.get("since_the_start", (False, False)))
        self._block, self._first = (_Block.from_state(block) for block in state.get("levels", ([0, 1, 0, 0, 0],) * 2))


def _is_policy(signals: Signals) -> bool:
    return any(words(name) & _POLICY for name in (*signals.names, *signals.metrics))


@final
class _Block:
    """Losses and norms of some steps, added up."""

    __slots__ = ("_norms", "_squares", "_sum", "count", "has_level")

    def __init__(self) -> None:
        self.count = 0
        self.has_level = True
        """No loss was zero or below, as those of policies are."""
        self._sum = self._squares = self._norms = 0.0

    def add(self, loss: float, norm: float) -> None:
        """One step; a loss that is not finite, or too large to be squared, does not count."""
        if -_HUGE < loss < _HUGE:
            self.count += 1
            self.has_level = self.has_level and loss > 0.0
            self._sum += loss
            self._squares += loss * loss
            self._norms += min(norm, _HUGE)

    def improves_on(self, first: "_Block") -> bool:
        """Whether the loss has fallen by more than it scatters while the norms did not grow."""
        if min(self.count, first.count) < _BLOCK // 2 or not (self.has_level and first.has_level):
            return False
        fell = first._sum / first.count - self._sum / self.count
        grown = self._norms / self.count > _GROWN * first._norms / first.count
        mean = self._sum / self.count
        scatter = math.sqrt(max(self._squares / self.count - mean * mean, 0.0))
        return fell > 2.0 * scatter and not grown

    def state(self) -> list[float | int]:
        """JSON-ready."""
        return [self.count, int(self.has_level), self._sum, self._squares, self._norms]

    @classmethod
    def from_state(cls, state: list[float | int]) -> "_Block":
        """The block that `state` describes."""
        block = cls()
        block.count, block.has_level = int(state[0]), bool(state[1])
        block._sum, block._squares, block._norms = (float(value) for value in state[2:])
        return block
