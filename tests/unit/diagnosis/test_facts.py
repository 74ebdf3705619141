"""What is counted over a run, and the properties that rules ask for."""

import json
import math

import pytest

from steadystep.diagnosis.facts import Occurrences, names, sentence, told
from steadystep.records import Probe
from tests.unit.diagnosis.made import curve, facts, finding, tally


class TestOccurrences:
    def test_how_often_and_when(self) -> None:
        found = tally(finding(step=3), finding(step=5), finding(step=9))
        assert (found.count, found.first, found.last) == (3, 3, 9)

    def test_the_worst_finite_value_and_its_clause(self) -> None:
        found = tally(
            finding(value=2.0, what="two"),
            finding(value=5.0, what="five"),
            finding(value=5.0, what="five again"),
            finding(value=math.inf, what="inf"),
            finding(value=math.nan, what="nan"),
            finding(value=4.0, what="four"),
        )
        assert (found.worst, found.what) == (5.0, "five")
        found = tally(finding(value=math.nan, what="nan"))
        assert (found.worst, found.what) == (None, "nan")
        found.add(finding(value=-1.0, what="a number"))
        assert (found.worst, found.what) == (-1.0, "a number")

    def test_names_by_how_often_they_came(self) -> None:
        found = tally(finding(where=("a", "b", "c")), finding(where=("c", "b")), finding(where=("c",)))
        assert found.names == {"a": 1, "b": 2, "c": 3}
        assert found.where == ("c", "b", "a")

    def test_64_names_are_kept_and_these_are_counted_on(self) -> None:
        found = tally(finding(where=tuple(f"layer {i}" for i in range(70))))
        assert list(found.names) == [f"layer {i}" for i in range(64)]
        found.add(finding(where=("layer 63", "layer 64")))
        assert len(found.names) == 64
        assert found.names["layer 63"] == 2

    def test_once_or_between_two_steps(self) -> None:
        assert "7" in tally(finding(step=7)).when
        several = tally(finding(step=7), finding(step=7), finding(step=19)).when
        assert [number for number in ("3", "7", "19") if number in several.split()] == ["3", "7", "19"]

    def test_saved_and_loaded_it_is_the_same(self) -> None:
        for found in (
            tally(finding(value=math.nan)),
            tally(finding(step=2, where=("a", "b")), finding(step=9, value=3)),
        ):
            state = json.loads(json.dumps(found.state_dict(), allow_nan=False))
            again = Occurrences.from_state(state)
            assert again.state_dict() == found.state_dict()
            again.add(finding(step=30, where=("b",)))
            found.add(finding(step=30, where=("b",)))
            assert again.state_dict() == found.state_dict()


class TestClauses:
    def test_three_names_and_how_many_more(self) -> None:
        assert names(()) == ""
        assert names(("a",)) == "a"
        assert names(("a", "b", "c")) == "a, b, c"
        assert names(("a", "b", "c", "d", "e")).startswith("a, b, c")
        assert names(("a", "b", "c", "d", "e")).split()[4] == "2"

    def test_one_finding(self) -> None:
        assert sentence(finding(what="too large")) == "too large"
        assert sentence(finding(what="too large", where=("a", "b"))) == "too large (a, b)"
        without = sentence(finding("mine", what="", value=2.5, limit=0.125))
        assert [part for part in ("mine", "2.5", "0.125") if part in without] == ["mine", "2.5", "0.125"]

    def test_what_was_found_over_a_run(self) -> None:
        plain, placed = tally(finding(what="dead")), tally(finding(what="dead", where=("a",)))
        assert told(plain) == f"dead, {plain.when}"
        assert told(placed) == f"dead (a), {placed.when}"


class TestFacts:
    def test_going_well_is_learned_and_not_lost_again(self) -> None:
        assert not facts(curve=None).going_well
        assert not facts(curve=curve(start=2.0, best=2.0, late=2.0)).going_well
        assert not facts(curve=curve(start=2.0, best=0.5, late=1.5)).going_well
        assert facts(curve=curve(start=2.0, best=0.5, late=0.5)).going_well

    def test_a_loss_below_zero_is_signed(self) -> None:
        assert not facts([]).signed
        assert not facts([0.0, 1.0]).signed
        assert facts([3.0, -1e-9, 1.0]).signed

    def test_the_usual_ratio_is_the_median_of_the_second_half(self) -> None:
        assert facts(ratios=()).ratio is None
        assert facts(ratios=(9.0,)).ratio == 9.0
        assert facts(ratios=(9.0, 9.0, 9.0, 1.0, 2.0, 4.0)).ratio == 2.0
        assert facts(ratios=(9.0, 9.0, 1.0, 2.0, 4.0)).ratio == 2.0

    def test_idle_and_done_shares_are_of_the_second_half(self) -> None:
        idle = facts([1.0] * 8, norms=[0.0] * 4 + [1.0, 0.0, 0.0, 0.0])
        assert (idle.idle_share, idle.done_share) == (0.75, 0.0)
        done = facts([0.0] * 5 + [1.0, 0.0, 0.0], norms=[1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
        assert (done.idle_share, done.done_share) == (0.75, 0.5)
        odd = facts([0.0] * 3, norms=[1.0, 0.0, 0.0])
        assert (odd.idle_share, odd.done_share) == (1.0, 1.0)
        assert (facts([]).idle_share, facts([]).done_share) == (0.0, 0.0)

    def test_weights_that_are_zero_and_stay_so(self) -> None:
        probe = Probe(
            step=4,
            names=("a.weight", "b.weight", "c.weight", "c.bias"),
            weight_rms=(0.0, 0.0, 1.0, 0.0),
            update_rms=(0.0, 1.0, 0.0, 0.0),
        )
        assert facts(probe=probe).stuck_at_zero == ("a.weight",)
        assert facts(probe=probe).weights == ("a.weight", "b.weight", "c.weight")
        assert facts(first_probe=probe).stuck_at_zero == facts(first_probe=probe).weights == ()
        assert facts(probe=Probe(step=4, names=("a",), weight_rms=(0.0,))).stuck_at_zero == (), "no update is known"

    def test_weights_above_a_size_at_the_first_probe(self) -> None:
        probe = Probe(step=1, names=("a", "b", "b.bias", "c", "d"), weight_rms=(1.0, 3.0, 9.0, 2.0))
        assert facts(first_probe=probe).weights_above(1.0) == ("b", "c")
        assert facts(first_probe=probe).weights_above(2.0) == ("b",)
        assert facts(probe=probe).weights_above(0.0) == ()

    def test_the_peak_and_its_step(self) -> None:
        assert facts([2.0, 9.0, 9.0, 3.0]).peak == (9.0, 1)
        assert facts([-2.0, -9.0]).peak == (-2.0, 0)
        peak, _ = facts([]).peak
        assert peak == pytest.approx(-math.inf)
