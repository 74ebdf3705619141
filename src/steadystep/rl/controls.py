"""What a loop lets the guard do about its policy: play rollouts to compare policies, and raise two coefficients."""

from collections.abc import Callable
from typing import Any, final

from steadystep.errors import MisuseError

_RAISE = 2.0  # times
_FROM_ZERO = 0.003  # the first entropy or KL coefficient where there was none
_MOST_RAISES = 4


@final
class Controls:
    """Gives a guard rollouts to compare policies with, and coefficients to raise: `guard.keep("policy", controls)`.

    With `evaluate`, autopilot rolls back when rollouts prove an earlier policy better; without it, it only warns.

    Args:
        evaluate: returns the reward of rollouts with the current weights; higher is better. Called 8 times for each
            state that is compared, again to confirm, each time with other random numbers. It must leave no trace.
        kl_coef: the KL coefficient of your loss; read `controls.kl_coef` in it.
        entropy_coef: the coefficient of the entropy bonus; read `controls.entropy_coef`.
        on_change: called with the name and the new value when one of them is raised.

    >>> controls = Controls(kl_coef=0.02, on_change=lambda name, value: print(name, value))
    >>> controls.raise_("kl_coef")
    kl_coef 0.04
    True
    >>> controls.kl_coef, controls.raise_("entropy_coef")
    (0.04, False)
    """

    def __init__(
        self,
        *,
        evaluate: Callable[[], float] | None = None,
        kl_coef: float | None = None,
        entropy_coef: float | None = None,
        on_change: Callable[[str, float], object] | None = None,
    ) -> None:
        if evaluate is not None and not callable(evaluate):
            raise MisuseError(f"evaluate must be a function without arguments, got {type(evaluate).__name__}")
        self.evaluate = evaluate
        self._on_change = on_change
        given = {"kl_coef": kl_coef, "entropy_coef": entropy_coef}
        self._values = {name: float(value) for name, value in given.items() if value is not None}
        for name, value in self._values.items():
            if not value >= 0.0:
                raise MisuseError(f"{name} = {value}: must not be negative")
        self._raised = dict.fromkeys(self._values, 0)

    @property
    def kl_coef(self) -> float:
        """The KL coefficient to use; 0 where none was given."""
        return self._values.get("kl_coef", 0.0)

    @property
    def entropy_coef(self) -> float:
        """The entropy coefficient to use; 0 where none was given."""
        return self._values.get("entropy_coef", 0.0)

    @property
    def names(self) -> tuple[str, ...]:
        """Coefficients that may be raised further: each is doubled four times at most."""
        return tuple(name for name in self._values if self._raised[name] < _MOST_RAISES)

    def raise_(self, name: str) -> bool:
        """Double a coefficient and report it; return False if it was not given or has been raised often enough."""
        if name not in self.names:
            return False
        self._values[name] = _RAISE * self._values[name] or _FROM_ZERO
        self._raised[name] += 1
        if self._on_change is not None:
            self._on_change(name, self._values[name])
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"values": dict(self._values), "raised": dict(self._raised)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; coefficients that differ are reported."""
        for name in self._values:
            value, raised = state["values"].get(name), state["raised"].get(name)
            if value is None or raised is None:
                continue
            # why: a rollback restores an earlier policy, but what was learned about the coefficient stays
            if raised >= self._raised[name]:
                changed, self._values[name], self._raised[name] = value != self._values[name], float(value), int(raised)
                if changed and self._on_change is not None:
                    self._on_change(name, float(value))
