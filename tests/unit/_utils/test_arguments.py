"""Numbers a call was given."""

from fractions import Fraction

import numpy as np
import pytest

from steadystep._utils.numbers import fraction, is_number, is_whole, real, state_keys, whole
from steadystep.errors import ConfigError


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1.0), np.int64(1), Fraction(1)])
def test_any_real_number_will_do(value: object) -> None:
    assert real("x", value, above=0.0, most=1.0) == 1.0
    assert type(real("x", value)) is float
    assert is_number(value)


@pytest.mark.parametrize("value", [True, None, "1", float("nan"), float("inf"), 10**400])
def test_what_is_no_finite_number(value: object) -> None:
    assert not is_number(value)
    with pytest.raises(ConfigError, match=r"^x = .*: must be a finite number$"):
        real("x", value)


def test_the_message_says_the_bounds() -> None:
    with pytest.raises(ConfigError, match=r"^x = 0: must be a finite number greater than 0 and at most 100$"):
        real("x", 0, above=0.0, most=100.0)
    with pytest.raises(ConfigError, match=r"^f\(\): x = 1: must be between 0 and 1$"):
        fraction("f(): x", 1)


def test_whole_numbers() -> None:
    assert whole("n", np.int64(3), least=3) == 3
    assert type(whole("n", np.int64(3), least=3)) is int
    assert is_whole(np.int64(3))
    assert not is_whole(True)
    assert not is_whole(3.0)
    with pytest.raises(ConfigError, match=r"^n = 3.0: must be an integer of at least 1 \(write 3\)$"):
        whole("n", 3.0, least=1)
    for wrong in (True, "3", 2):
        with pytest.raises(ConfigError, match=r"must be an integer of at least 3$"):
            whole("n", wrong, least=3)


def test_a_state_of_another_class() -> None:
    state_keys("Rule", {"a": 1, "b": 2}, "b", "a")
    with pytest.raises(ConfigError, match=r"^not a state of Rule: keys \['a'\], expected \['b'\]$"):
        state_keys("Rule", {"a": 1}, "b")
    with pytest.raises(ConfigError, match="pass what its state_dict"):
        state_keys("Rule", [], "b")  # type: ignore[arg-type]
