"""NaN and infinity in JSON."""

import json
import math

import pytest

from steadystep._utils.numbers import as_json, as_list, from_json, number_word, or_null, with_words

ODD = [(math.nan, "NaN", "nan"), (math.inf, "Infinity", "inf"), (-math.inf, "-Infinity", "-inf")]


@pytest.mark.parametrize(("value", "ours", "pythons"), ODD)
def test_each_spelling_is_written_in_its_place_and_both_are_read(value: float, ours: str, pythons: str) -> None:
    assert as_json(value) == ours
    assert as_list([1.0, value]) == f'[1.0,"{ours}"]'
    assert with_words({1: [value, (0.5,)]}) == {"1": [pythons, [0.5]]}
    assert or_null(value) is None
    for word in (ours, pythons, ours.lower()):
        assert repr(from_json(word)) == repr(value)


def test_finite_numbers_and_their_digits() -> None:
    assert json.dumps(as_json(1 / 3)) == "0.333333333"
    assert as_list([1 / 3, 2e-9]) == "[0.333333,2e-09]"
    assert from_json(3) == 3.0
    assert or_null("text") == "text"
    assert or_null(0.0) == 0.0


@pytest.mark.parametrize("value", ["1.5", "", None, True, [1.0]])
def test_what_is_no_number(value: object) -> None:
    with pytest.raises(TypeError):
        from_json(value)
    assert number_word(str(value)) is None
