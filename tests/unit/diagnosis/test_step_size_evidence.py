"""Signs that the steps are too large: each holds on one side of its limit and not on the other."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from steadystep.diagnosis import step_size_evidence as signs
from steadystep.diagnosis.facts import Facts
from steadystep.records import InputStats, Probe
from tests.unit.diagnosis.limits import At, at_limits, run
from tests.unit.diagnosis.made import curve, facts, finding, tallies, tally


def holds(sign: Callable[[Facts], Any], **changes: Any) -> bool:
    return bool(sign(facts(**changes)))


def table(sign: Callable[[Facts], Any], *rows: tuple[dict[str, Any], bool]) -> None:
    for changes, expected in rows:
        assert holds(sign, **changes) is expected, changes


class TestUpdates:
    def test_huge_ones(self) -> None:
        table(
            signs.huge_updates,
            ({"ratios": (0.3,) * 4}, True),
            ({"ratios": (0.3,) * 3}, False),
            ({"ratios": (0.299,) * 4}, False),
            ({"ratios": (9.0, 9.0, 0.1, 0.1)}, False),  # at first only
            ({"ratios": ()}, False),
        )

    def test_large_ones(self) -> None:
        table(
            signs.large_updates,
            ({"ratios": (0.1,)}, True),
            ({"ratios": (0.099,)}, False),
            ({"ratios": (0.299,)}, True),
            ({"ratios": (0.3,)}, False),  # huge
            ({"ratios": ()}, False),
        )

    def test_a_leap_is_among_the_first_four(self) -> None:
        table(
            signs.leaped,
            ({"ratios": (0.3,)}, True),
            ({"ratios": (0.299,)}, False),
            ({"ratios": (0.0, 0.0, 0.0, 0.3, 0.0)}, True),
            ({"ratios": (0.0, 0.0, 0.0, 0.0, 0.3)}, False),
            ({"ratios": ()}, False),
        )

    def test_numbers_are_named(self) -> None:
        assert "0.45" in signs.huge_updates(facts(ratios=(0.45,) * 4))
        assert "0.15" in signs.large_updates(facts(ratios=(0.15,) * 4))
        assert "0.45" in signs.leaped(facts(ratios=(0.1, 0.45, 0.2)))


class TestRates:
    def test_sharp_attention(self) -> None:
        table(
            signs.sharp_attention,
            ({}, False),
            ({"probe": Probe(step=9)}, False),
            ({"probe": Probe(step=9, logit_bounds=(1.0, 99.0))}, False),
            ({"probe": Probe(step=9, logit_bounds=(1.0, 100.0))}, True),
            ({"probe": Probe(step=9, logit_bounds=(math.inf, math.nan, 99.0))}, False),
            ({"probe": Probe(step=9, logit_bounds=(math.nan, 120.0))}, True),
        )

    def test_bold_and_reckless_adam(self) -> None:
        adam, other = Probe(step=9, second_moments=(1.0,)), Probe(step=9)
        for lr, bold, reckless in ((0.099, False, False), (0.1, True, False), (0.29, True, False), (0.3, True, True)):
            lrs = [1e-3] * 20 + [lr] + [1e-3] * 20  # the largest counts
            made = {"losses": [2.0] * 41, "lrs": lrs}
            assert holds(signs.bold_adam, probe=adam, **made) is bold, lr
            assert holds(signs.reckless_adam, probe=adam, **made) is reckless, lr
            for probe in (other, None):
                assert not holds(signs.bold_adam, probe=probe, **made)
                assert not holds(signs.reckless_adam, probe=probe, **made)
        assert not holds(signs.bold_adam, losses=[], probe=adam)
        assert not holds(signs.reckless_adam, losses=[], probe=adam)

    def test_spikes_in_more_than_one_step_of_a_hundred(self) -> None:
        short, long = {"losses": [2.0] * 100}, {"losses": [2.0] * 400}
        table(
            signs.frequent_spikes,
            ({**short, "warned": tallies("loss-spike", times=2)}, False),
            ({**short, "warned": tallies("loss-spike", times=3)}, True),
            ({**short, "noted": tallies("gradient-spike", times=3)}, True),
            ({**short, "noted": tallies("loss-spike"), "warned": tallies("loss-spike", "gradient-spike")}, True),
            ({**short, "warned": tallies("oscillation", times=9)}, False),
            ({**long, "warned": tallies("loss-spike", times=3)}, False),
            ({**long, "warned": tallies("loss-spike", times=4)}, True),
        )


class TestLevels:
    def test_climbed_in_the_first_32_steps(self) -> None:
        def losses(peak: float, at: int, first: float = 4.0) -> list[float]:
            return [peak if step == at else first for step in range(100)]

        table(
            signs.climbed,
            ({"losses": losses(5.0, 32)}, False),  # a quarter
            ({"losses": losses(5.1, 32)}, True),
            ({"losses": losses(5.1, 33)}, False),
            ({"losses": losses(9.0, 5), "curve": curve(noise=1.0)}, False),  # five times the noise
            ({"losses": losses(9.1, 5), "curve": curve(noise=1.0)}, True),
            ({"losses": losses(9.0, 5), "curve": None}, False),
            ({"losses": [*losses(9.0, 5), -1.0]}, False),
        )

    def test_never_recovered(self) -> None:
        def losses(peak: float, at: int) -> list[float]:
            return [4.0, *(peak if step == at else 4.0 for step in range(1, 101))]

        high = {"curve": curve(start=4.0, best=4.0)}
        table(
            signs.never_recovered,
            ({"losses": losses(12.0, 25), **high}, False),  # twice the first on top
            ({"losses": losses(12.1, 25), **high}, True),
            ({"losses": losses(12.1, 26), **high}, False),  # in the first quarter
            ({"losses": losses(50.0, 25), "curve": curve(start=4.0, best=3.6)}, True),
            ({"losses": losses(50.0, 25), "curve": curve(start=4.0, best=3.5)}, False),
            ({"losses": losses(50.0, 25), "curve": curve(start=4.0, best=4.0, noise=4.5)}, True),
            ({"losses": losses(50.0, 25), "curve": curve(start=4.0, best=4.0, noise=4.7)}, False),  # ten times
            ({"losses": losses(50.0, 25), "curve": None}, False),
            ({"losses": [*losses(50.0, 25), -1.0], **high}, False),
        )

    def test_rose(self) -> None:
        up = curve(start=2.0, late=3.0)
        table(
            signs.rose,
            ({"curve": up}, True),
            ({"curve": curve()}, False),
            ({"curve": None}, False),
            ({"curve": up, "losses": [2.0, -1.0]}, False),
        )

    def test_fell_back(self) -> None:
        lost = curve(start=2.0, best=1.0, late=1.5)
        table(
            signs.fell_back,
            ({"curve": lost}, True),
            ({"curve": curve(start=2.0, best=1.0, late=1.0)}, False),
            ({"curve": curve(start=2.0, best=2.0, late=3.0)}, False),  # nothing was learned
            ({"curve": None}, False),
            ({"curve": lost, "losses": [2.0, -1.0]}, False),
        )

    def test_went_up(self) -> None:
        table(
            signs.went_up,
            ({"losses": [2.0, 60.0, 2.0]}, False),  # thirtyfold
            ({"losses": [2.0, 60.1, 2.0]}, True),
            ({"losses": [0.0, 60.1, 2.0]}, False),
            ({"losses": [2.0, 60.1, -2.0]}, False),
            ({"losses": []}, False),
        )

    def test_cold_start(self) -> None:
        table(
            signs.cold_start,
            ({"losses": [20.0] * 40, "curve": curve(best=1.9)}, True),
            ({"losses": [19.9] * 40, "curve": curve(best=1.9)}, False),
            ({"losses": [20.0] * 40, "curve": curve(best=2.0)}, False),  # a tenth of it
            ({"losses": [200.0] * 40, "curve": curve(best=9.9)}, True),
            ({"losses": [200.0] * 40, "curve": curve(best=10.0)}, False),
            ({"losses": [200.0] * 40, "curve": None}, False),
            ({"losses": [200.0] * 40 + [-1.0], "curve": curve(best=1.0)}, False),
        )

    def test_high_start(self) -> None:
        table(
            signs.high_start,
            ({"losses": [30.0] * 40, "curve": curve(best=1.0)}, True),  # thirtyfold
            ({"losses": [29.9] * 40, "curve": curve(best=1.0)}, False),
            ({"losses": [20.0] * 40, "curve": curve(best=0.0)}, True),
            ({"losses": [19.9] * 40, "curve": curve(best=0.0)}, False),
            ({"losses": [30.0] * 40, "curve": None}, False),
            ({"losses": [], "curve": curve(best=0.0)}, False),
            ({"losses": [30.0] * 40 + [-1.0], "curve": curve(best=0.0)}, False),
        )

    def test_numbers_are_named(self) -> None:
        peak = [2.0] + [77.0] + [2.0] * 98
        for sign in (signs.climbed, signs.never_recovered, signs.went_up):
            assert "77" in sign(facts(losses=peak))
        assert "33" in signs.cold_start(facts(losses=[33.0] * 40, curve=curve(best=0.5)))
        assert "33" in signs.high_start(facts(losses=[33.0] * 40, curve=curve(best=0.5)))


def inputs(**changes: float) -> InputStats:
    plain = {"mean": 0.0, "std": 1.0, "largest": 4.0, "constant_share": 0.0, "scale_spread": 1.0}
    return InputStats(batches=4, finite=True, **plain | changes)


RAW = inputs(std=100.0, largest=900.0)
WELL = curve(start=4.0, best=1.0, late=1.0)
HALVED = curve(start=4.0, best=2.0, late=2.0, noise=0.0)


class TestInputs:
    def test_large_ones(self) -> None:
        table(
            signs.large_inputs,
            ({"inputs": None}, False),
            ({"inputs": inputs(std=19.9)}, False),
            ({"inputs": inputs(std=20.0)}, True),
            ({"inputs": inputs(mean=20.0)}, True),
            ({"inputs": inputs(mean=-20.0)}, True),
            ({"inputs": inputs(mean=-19.9)}, False),
        )

    def test_uneven_ones(self) -> None:
        table(
            signs.uneven_inputs,
            ({"inputs": None}, False),
            ({"inputs": inputs(scale_spread=1e3, largest=20.0)}, True),
            ({"inputs": inputs(scale_spread=999.0, largest=20.0)}, False),
            ({"inputs": inputs(scale_spread=1e3, largest=19.9)}, False),
        )

    def test_a_run_suffers_from_them(self) -> None:
        """Where it goes well, only what is broken all the same counts."""
        dead = Probe(step=9, modules=("a",), dead=(1.0,), saturated=(0.0,))
        flat = Probe(step=9, modules=("a",), dead=(0.0,), saturated=(0.9,))
        barely = curve(start=4.0, best=3.5, late=3.5)  # going well, not halved
        for made, well, badly in (
            ({"losses": [2.0, 90.0, 2.0]}, True, True),
            ({"probe": dead}, True, True),
            ({"probe": flat}, True, True),
            ({"ratios": (0.5,) * 4}, True, True),
            ({"losses": [50.0] * 9}, False, True),
            ({"warned": tallies("loss-spike", times=9)}, False, True),
            ({"incidents": {"non-finite-loss": tally(finding("non-finite"))}}, False, True),
            ({}, False, True),  # slow
        ):
            for odd in (RAW, inputs(scale_spread=1e4, largest=900.0)):
                assert holds(signs.suffers, inputs=odd, curve=barely, **made) is well, made
                assert holds(signs.suffers, inputs=odd, curve=curve(), **made) is badly, made
            assert not holds(signs.suffers, inputs=inputs(), curve=curve(), **made), made
            assert not holds(signs.suffers, inputs=None, curve=curve(), **made), made

    def test_what_it_suffers_from_in_a_curve_that_has_learned(self) -> None:
        lost = curve(start=4.0, best=1.0, late=4.0)  # learned, and lost again
        for made, expected in (
            ({}, False),
            ({"losses": [25.0] * 40}, True),  # a cold start
            ({"losses": [40.0] * 40, "curve": curve(start=400.0, best=10.5, late=90.0)}, False),
            ({"losses": [400.0] * 40, "curve": curve(start=400.0, best=12.0, late=90.0)}, True),  # a high start
            ({"curve": curve(start=4.0, best=1.0, late=5.0)}, True),  # rose
            ({"warned": tallies("gradient-spike", times=3)}, True),
            ({"incidents": {"non-finite-gradient": tally(finding("non-finite"))}}, True),
            ({"incidents": {"forward-overflow": tally(finding("non-finite"))}}, True),
            ({"incidents": {"bad-batch": tally(finding("loss-spike"))}}, False),
        ):
            assert holds(signs.suffers, **{"inputs": RAW, "curve": lost, "losses": [4.0] * 40} | made) is expected, made

    def test_a_run_that_learns_does_not_suffer(self) -> None:
        spoiled = {"losses": [2.0, 90.0, 2.0], "inputs": RAW}
        assert not holds(signs.suffers, curve=HALVED, **spoiled)
        assert holds(signs.suffers, curve=curve(start=4.0, best=2.1, late=2.1), **spoiled)


class TestLearns:
    def test_halved_for_good(self) -> None:
        table(
            signs.has_halved,
            ({"curve": HALVED}, True),
            ({"curve": curve(start=4.0, best=2.1, late=2.1)}, False),
            ({"curve": curve(start=4.0, best=1.0, late=1.9)}, False),  # lost again
            ({"curve": None}, False),
            ({"curve": HALVED, "losses": [2.0] * 40 + [-1.0]}, False),
        )

    def test_by_a_net_that_is_alive_and_does_not_guess(self) -> None:
        dead = Probe(step=9, modules=("a",), dead=(1.0,))
        assert not holds(signs.has_halved, curve=HALVED, probe=dead)
        ln5 = math.log(5)
        assert not holds(signs.has_halved, curve=curve(start=9.0, best=ln5, late=ln5))
        for below, count, learns in ((0.34, 256, False), (0.37, 256, True), (0.37, 200, False)):
            late = ln5 - below * 0.1  # two standard errors of 32 points are 0.035 at this noise
            made = curve(start=9.0, best=late, late=late, noise=0.1)
            assert holds(signs.has_halved, curve=made, losses=[2.0] * count) is learns, (below, count)


class TestWeights:
    def probe(self, *sizes: float) -> dict[str, Any]:
        probe = Probe(step=1, names=tuple(f"{i}.weight" for i in range(len(sizes))), weight_rms=sizes)
        return {"first_probe": probe, "probe": probe}

    def test_large_ones(self) -> None:
        table(
            signs.large_weights,
            ({}, False),
            (self.probe(3.1, 0.1, 0.1), False),
            (self.probe(3.2, 0.1, 0.1), True),  # a variance of 10
            (self.probe(0.81, 0.81, 0.81, 0.1), True),  # most of them
            (self.probe(0.79, 0.81, 0.81, 0.1), False),
            (self.probe(0.81, 0.81, 0.81, 0.1, 0.1), False),  # not more than 0.6
            (self.probe(0.81, 0.81, 0.81, 0.81, 0.1, 0.1), True),
            (self.probe(0.81, 0.81), False),  # not three
            ({**self.probe(9.0, 9.0, 9.0), "ratios": (0.3,)}, False),  # the first update made them so
        )

    def test_nearly_all_of_them(self) -> None:
        table(
            signs.all_weights_large,
            ({}, False),
            (self.probe(3.2, 3.2, 3.2, 0.1), True),
            (self.probe(3.1, 3.2, 3.2, 0.1), False),
            (self.probe(3.2, 3.2), False),
            (self.probe(3.2, 3.2, 3.2, 0.1, 0.1), False),
            ({**self.probe(9.0, 9.0, 9.0), "ratios": (0.3,)}, False),
        )

    def test_sizes_before_the_first_update_count_before_those_of_a_probe(self) -> None:
        before = {"initial.names": ("0.weight", "1.weight", "2.bias"), "initial.rms": (3.2, 0.1, 9.0)}
        after = {"first_probe.names": ("0.weight", "1.weight"), "first_probe.weight_rms": (0.1, 3.2)}
        made = run(before | after)
        assert made.weights_above(3.0) == ("0.weight",)
        assert "large before the first update: 0.weight" in signs.large_weights(made)
        assert "large after the first update: 1.weight" in signs.large_weights(run(after))

    def test_sizes_before_the_first_update_were_not_made_by_it(self) -> None:
        names = ("0.weight", "1.weight", "2.weight")
        probe = {"probe.names": names, "probe.weight_rms": (9.0,) * 3, "ratios": (0.3,)}
        before = probe | {"initial.names": names, "initial.rms": (9.0,) * 3}
        after = probe | {"first_probe.names": names, "first_probe.weight_rms": (9.0,) * 3}
        assert "variance above 10 before" in signs.all_weights_large(run(before))
        assert signs.large_weights(run(before))
        assert signs.all_weights_large(run(after)) == signs.large_weights(run(after)) == ""
        assert "variance above 10 after" in signs.all_weights_large(run(after | {"ratios": ()}))


SPIKES = {"loss-spike": tally(*[finding("loss-spike")] * 9), "not-healing": tally(finding("not-healing"))}


def seen(*detectors: str, **more: Any) -> dict[str, Any]:
    """Spikes and a loss that does not heal, and these."""
    return {"warned": SPIKES | tallies(*detectors), **more}


@at_limits(
    At(
        signs.unsteady,
        seen("oscillation"),
        also=(
            (seen("slow-divergence"), seen()),
            (seen(noted=("oscillation",)), seen(noted=("clip-rate",))),
            ({}, seen("oscillation", "weight-jump")),
            ({}, seen("oscillation", "bit-flip")),
            ({}, {"warned": tallies("oscillation", "not-healing")}),
            ({}, {"warned": tallies("oscillation") | tallies("loss-spike", times=9)}),
        ),
    ),
    At(
        signs.died,
        {"probe.modules": ("1",), "probe.dead": (1.0,), "first_probe.modules": ("1",), "first_probe.dead": (0.2,)},
        {"probe.dead": ((0.99,), (0.98,)), "first_probe.dead": [((0.79,), (0.8,)), (..., ())]},
    ),
)
def test_it_is_said_at_its_limit_and_not_beyond(row: At) -> None:
    row.check()


def test_most_of_what_died_was_alive() -> None:
    dead = {"probe.modules": ("1", "2", "3"), "probe.dead": (1.0, 1.0, 0.1)}
    made = run(dead | {"first_probe.dead": (0.2, 0.6, 0.7)})
    assert "only 60% were" in signs.died(made)
    probe = Probe(step=1, modules=("1",), dead=(1.0,))
    assert signs.died(facts(probe=probe, first_probe=probe)) == ""


@pytest.mark.parametrize(("momentum", "told"), [(0.98, ""), (0.99, "adds up 100 steps"), (1.0, "")])
def test_a_high_momentum_is_told(momentum: float, told: str) -> None:
    said = signs.unsteady(run(seen("oscillation"), **{"structure.momentum": momentum}))
    assert said
    assert said.endswith(told)
    assert ("momentum" in said) is bool(told)


def test_a_loss_that_multiplied_at_once_excuses_no_inputs() -> None:
    early = {"early-divergence": tally(finding("early-divergence"))}
    assert signs.suffers(facts(inputs=RAW, curve=HALVED, warned=early)).startswith("something about early-divergence")
    assert not holds(signs.suffers, inputs=inputs(), curve=HALVED, warned=early)
