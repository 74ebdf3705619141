"""Signs that something does not learn: each holds on one side of its limit and not on the other."""

import math
from collections.abc import Callable
from typing import Any

from steadystep.diagnosis import learning_evidence as signs
from steadystep.diagnosis.facts import Facts
from steadystep.records import DetectorName, Probe
from tests.unit.diagnosis.limits import At, at_limits, run
from tests.unit.diagnosis.made import curve, facts, finding, tallies, tally


def holds(sign: Callable[[Facts], str], **changes: object) -> bool:
    return bool(sign(facts(**changes)))


IDLE = {"losses": [2.0] * 40, "norms": [0.0] * 40}


class TestTallies:
    def test_warnings_of_one_detector(self) -> None:
        sign = signs.warned("mine")
        assert sign(facts(warned=tallies("mine", "other"))).startswith("something about mine")
        assert not holds(sign, warned=tallies("other"), noted=tallies("mine"))

    def test_notes_count_where_it_did_not_warn(self) -> None:
        sign = signs.noted("mine")
        assert sign(facts(noted=tallies("mine", "other"))).startswith("something about mine")
        assert not holds(sign, noted=tallies("mine"), warned=tallies("mine"))
        assert not holds(sign, noted=tallies("other"), warned=tallies("other"))

    def test_what_no_rule_knows_is_passed_on(self) -> None:
        found = {"mine": tally(finding("mine")), "yours": tally(finding("yours")), **tallies("clip-rate")}
        text = signs.unexplained(facts(warned=found))
        assert [name for name in ("mine", "yours", "clip-rate") if f"about {name}" in text] == ["mine", "yours"]
        assert signs.unexplained(facts()) == ""

    def test_detectors_of_ours_have_rules(self) -> None:
        ours = {value for name, value in vars(DetectorName).items() if name.isupper()}
        assert len(ours) > 30
        left = {name for name in ours if holds(signs.unexplained, warned=tallies(name))}
        assert left <= {"odd-replica", "short-warmup"}


class TestUnits:
    def test_dead_units_unless_nothing_learns_at_all(self) -> None:
        assert holds(signs.dead_units, warned=tallies("dead-units"))
        assert not holds(signs.dead_units, warned=tallies("saturated-units"))
        assert not holds(signs.dead_units, warned=tallies("dead-units"), **IDLE)

    def test_a_layer_that_is_dead_as_a_whole(self) -> None:
        for share, expected in ((0.989, False), (0.99, True), (1.0, True)):
            probe = Probe(step=7, modules=("a", "b"), dead=(0.0, share), saturated=(1.0, 0.0))
            assert holds(signs.dead_layer, probe=probe) is expected
            assert not holds(signs.dead_layer, probe=probe, **IDLE)
        assert not holds(signs.dead_layer)
        assert holds(signs.dead_layer, probe=Probe(step=7, modules=("a", "b"), dead=(1.0,)))

    def test_a_layer_that_is_mostly_flat(self) -> None:
        for share, expected in ((0.49, False), (0.5, True)):
            probe = Probe(step=7, modules=("a", "b"), dead=(1.0, 1.0), saturated=(0.0, share))
            assert holds(signs.saturated_layer, probe=probe) is expected
        assert not holds(signs.saturated_layer)
        assert holds(signs.saturated_layer, probe=Probe(step=7, modules=("a", "b"), saturated=(1.0,)))


class TestZeros:
    def test_idle_is_no_gradient_though_there_is_a_loss(self) -> None:
        for zeros, expected in ((10, False), (11, True)):  # of the later 20
            norms = [1.0] * (40 - zeros) + [0.0] * zeros
            assert holds(signs.idle, losses=[2.0] * 40, norms=norms) is expected
            assert not holds(signs.idle, losses=[0.0] * 40, norms=norms)
        # 18 of 20 without a gradient, seven of these without a loss
        norms = [1.0] * 22 + [0.0] * 18
        assert holds(signs.idle, losses=[2.0] * 33 + [0.0] * 7, norms=norms)
        assert not holds(signs.idle, losses=[2.0] * 32 + [0.0] * 8, norms=norms)

    def test_done_is_neither_in_nearly_all_batches(self) -> None:
        for zeros, expected in ((18, False), (19, True)):
            norms = [1.0] * (40 - zeros) + [0.0] * zeros
            assert holds(signs.done, losses=[0.0] * 40, norms=norms) is expected
        assert not holds(signs.done, **IDLE)

    def test_half_of_the_weights_at_zero(self) -> None:
        for zeros, expected in ((0, False), (1, False), (2, True), (4, True)):
            names = tuple(f"{i}.weight" for i in range(4))
            rms = tuple(0.0 if i < zeros else 1.0 for i in range(4))
            probe = Probe(step=7, names=names, weight_rms=rms, update_rms=rms)
            assert holds(signs.weights_at_zero, probe=probe) is expected, zeros
        assert not holds(signs.weights_at_zero)

    def test_underflow_under_a_scaler(self) -> None:
        def probe(*shares: float, dead: float = 0.0) -> Probe:
            return Probe(step=7, zero_shares=shares, modules=("a",), dead=(dead,))

        for shares, expected in (
            ((0.9, 0.51, 0.0), True),  # the median tensor
            ((0.0, 0.51, 0.9), True),
            ((0.5, 0.9, 0.0), False),
            ((0.9, 0.9, 0.0, 0.0), True),  # the upper one of two
            ((0.9, 0.0, 0.0, 0.0), False),
        ):
            assert holds(signs.underflow, scaled=True, probe=probe(*shares)) is expected, shares
            assert not holds(signs.underflow, scaled=False, probe=probe(*shares))
            assert not holds(signs.underflow, scaled=True, probe=probe(*shares, dead=1.0))

    def test_underflow_without_a_probe(self) -> None:
        assert not holds(signs.underflow, scaled=True)
        assert holds(signs.underflow, scaled=True, warned=tallies("zero-gradient"))
        assert holds(signs.underflow, scaled=True, **IDLE)
        assert not holds(signs.underflow, scaled=False, warned=tallies("zero-gradient"), **IDLE)
        both = facts(scaled=True, warned=tallies("zero-gradient"), **IDLE)
        assert signs.underflow(both).startswith("something about zero-gradient")


class TestGuesses:
    LN5 = math.log(5)

    def holds(self, *, count: int = 256, ratio: float = 1e-3, opposed: bool = False, **changes: float | bool) -> bool:
        level = dict.fromkeys(("start", "best", "late", "lowest", "highest"), self.LN5)
        made = curve(**level | changes)
        return holds(signs.guesses, losses=[2.0] * count, curve=made, ratios=(ratio,), opposed=opposed)

    def test_a_level_of_guessing_while_weights_move(self) -> None:
        assert self.holds()
        assert not self.holds(late=1.5)
        assert not self.holds(settled=False)
        assert not self.holds(opposed=True)
        assert not holds(signs.guesses, curve=curve(late=self.LN5), ratios=())
        assert not holds(signs.guesses, curve=None, ratios=(1e-3,))

    def test_it_takes_200_updates_of_usual_size(self) -> None:
        assert not self.holds(count=199)
        assert self.holds(count=200)
        assert not self.holds(ratio=2.9e-4)
        assert self.holds(ratio=3e-4)

    def test_the_curve_must_be_quiet(self) -> None:
        assert self.holds(noise=0.029 * self.LN5)
        assert not self.holds(noise=0.03 * self.LN5)
        assert self.holds(highest=1.49 * self.LN5)
        assert not self.holds(highest=1.51 * self.LN5)
        assert not self.holds(lowest=0.49 * self.LN5)

    def test_it_may_have_begun_a_quarter_higher(self) -> None:
        assert self.holds(start=1.24 * self.LN5)
        assert not self.holds(start=1.26 * self.LN5)

    def test_a_noisy_level_is_known_less_precisely(self) -> None:
        """Two standard errors of an eighth of the points: of 256 it is 2 noise / sqrt(32)."""
        noise = 0.02 * self.LN5
        assert self.holds(late=self.LN5 - 0.34 * noise, noise=noise)
        assert not self.holds(late=self.LN5 - 0.37 * noise, noise=noise)
        assert self.holds(late=self.LN5 - 0.37 * noise, noise=noise, count=200)


class TestPilesUp:
    def test_sums_and_their_counterparts(self) -> None:
        linear = [float(step + 1) for step in range(16)]
        for norms, expected in (
            (linear, True),
            (linear[:15], False),  # too short
            ([*linear, 0.0, 0.0], True),  # the first 16 count
            ([0.0, *linear[1:]], False),
            ([-1.0, *linear[1:]], False),
            ([1.24**step for step in range(16)], False),  # 5.6-fold in the last doubling
            ([1.0] * 16, False),
            ([float((step + 1) ** 0.6) for step in range(16)], False),  # 5.3-fold in all
            ([float((step + 1) ** 0.72) for step in range(16)], True),  # 7.4-fold
            ([float((step + 1) ** 2.1) for step in range(16)], False),  # more than 4-fold per doubling
        ):
            assert holds(signs.piles_up, losses=[1.0] * len(norms), norms=norms) is expected, norms

    def test_two_setbacks_are_forgiven_and_three_are_not(self) -> None:
        for setbacks, expected in (((4, 9), True), ((4, 9, 11), False)):
            norms = [float(step + 1) for step in range(16)]
            for at in setbacks:
                norms[at] = norms[at - 1] - 0.5
            assert holds(signs.piles_up, losses=[1.0] * 16, norms=norms) is expected

    def test_each_doubling_has_to_grow_and_not_too_much(self) -> None:
        def norms(*doublings: float) -> list[float]:
            ends = [1.0]
            for factor in doublings:
                ends.append(ends[-1] * factor)
            at = [0, 1, 3, 7, 15]
            made = []
            for n in range(4):
                steps = at[n + 1] - at[n]
                made += [ends[n] + (ends[n + 1] - ends[n]) * i / steps for i in range(steps)]
            return [*made, ends[4]]

        for doublings, expected in (
            ((2.0, 2.0, 2.0, 2.0), True),
            ((1.16, 2.0, 2.0, 2.0), True),
            ((1.14, 3.0, 2.0, 2.0), False),
            ((3.0, 1.14, 2.0, 2.0), False),
            ((3.0, 2.0, 1.14, 2.0), False),
            ((3.0, 2.0, 2.0, 1.14), False),
            ((3.9, 1.5, 1.5, 1.5), True),
            ((4.1, 1.5, 1.5, 1.5), False),
            ((1.5, 4.1, 1.5, 1.5), False),
            ((1.5, 1.5, 4.1, 1.5), False),
            ((1.5, 1.5, 1.5, 4.1), False),
            ((1.6, 1.6, 1.6, 1.75), True),  # 7.2-fold
            ((1.6, 1.6, 1.6, 1.68), False),  # 6.9-fold
        ):
            assert holds(signs.piles_up, losses=[1.0] * 16, norms=norms(*doublings)) is expected, doublings


class TestUnchanged:
    def probe(self, *updates: float) -> Probe:
        return Probe(step=7, names=("a", "b"), weight_rms=(1.0, 1.0), update_rms=updates)

    def test_gradients_and_no_update(self) -> None:
        still = self.probe(0.0, 0.0)
        assert holds(signs.unchanged, ratios=(0.0,) * 4, first_probe=still, probe=still)
        assert not holds(signs.unchanged, ratios=(0.0,) * 3, first_probe=still, probe=still)
        for moved in (self.probe(0.0, 1e-9), self.probe(1e-9, 0.0)):
            assert not holds(signs.unchanged, ratios=(0.0,) * 4, first_probe=still, probe=moved)
            assert not holds(signs.unchanged, ratios=(0.0,) * 4, first_probe=moved, probe=still)

    def test_without_a_probe_nothing_is_known(self) -> None:
        assert not holds(signs.unchanged, ratios=(0.0,) * 4)
        assert not holds(signs.unchanged, ratios=(0.0,) * 4, probe=Probe(step=7))
        assert holds(signs.unchanged, ratios=(0.0,) * 4, first_probe=Probe(step=1), probe=self.probe(0.0, 0.0))

    def test_without_a_gradient_there_is_nothing_to_do(self) -> None:
        still = self.probe(0.0, 0.0)
        norms = [1.0] * 39 + [0.0]
        assert not holds(
            signs.unchanged, ratios=(0.0,) * 4, first_probe=still, probe=still, losses=[2.0] * 40, norms=norms
        )


class TestHardlyMoves:
    def holds(self, ratio: float = 1e-6, *, count: int = 256, **changes: float) -> bool:
        return holds(signs.hardly_moves, losses=[2.0] * count, highest_ratio=ratio, curve=curve(**changes))

    def test_nothing_learned_and_nothing_moved(self) -> None:
        assert self.holds()
        assert not self.holds(0.0)
        assert self.holds(9.9e-6)
        assert not self.holds(1.01e-5)
        assert not holds(signs.hardly_moves, highest_ratio=1e-6, curve=None)

    def test_it_takes_200_updates(self) -> None:
        assert not self.holds(count=199)
        assert self.holds(count=200)

    def test_many_small_updates_are_a_journey(self) -> None:
        """2,000 updates of 6e-6 are more than a hundredth."""
        assert self.holds(4.9e-6, count=2000)
        assert not self.holds(5.1e-6, count=2000)

    def test_a_loss_that_fell_is_left_alone(self) -> None:
        assert self.holds(start=100.0, best=98.1)
        assert not self.holds(start=100.0, best=97.9)
        assert self.holds(start=-100.0, best=-101.9)
        assert not self.holds(start=-100.0, best=-102.1)
        assert self.holds(start=100.0, best=95.1, noise=3.0)
        assert not self.holds(start=100.0, best=94.9, noise=3.0)

    def test_the_largest_rate_is_named(self) -> None:
        made = facts(losses=[2.0] * 256, lrs=[0.25] * 128 + [0.125] * 128, highest_ratio=1e-6)
        assert "0.25" in signs.hardly_moves(made)


class TestDrowned:
    def holds(self, ratio: float = 0.03, *, losses: list[float] | None = None, **changes: float | bool) -> bool:
        made = curve(**{"noise": 3.0} | changes)
        return holds(signs.drowned, losses=losses or [2.0] * 256, ratios=(ratio,), curve=made)

    def test_noise_as_large_as_the_loss(self) -> None:
        assert self.holds()
        assert self.holds(noise=2.0)
        assert not self.holds(noise=1.9)
        assert not self.holds(late=0.0, best=0.0)
        assert not self.holds(settled=False)
        assert not self.holds(start=9.0, best=2.0)  # it has learned

    def test_updates_large_enough_to_follow_it_and_not_larger(self) -> None:
        assert self.holds(0.01)
        assert not self.holds(0.0099)
        assert self.holds(0.0999)
        assert not self.holds(0.1)
        assert not holds(signs.drowned, ratios=(), curve=curve(noise=3.0))
        assert not holds(signs.drowned, ratios=(0.03,), curve=None)

    def test_it_takes_200_updates_and_losses_above_zero(self) -> None:
        assert not self.holds(losses=[2.0] * 199)
        assert self.holds(losses=[2.0] * 200)
        assert not self.holds(losses=[2.0] * 255 + [-1.0])

    def test_the_share_is_named(self) -> None:
        assert "150%" in signs.drowned(facts(ratios=(0.03,), curve=curve(noise=3.0)))


NAMES = ("0.weight", "1.weight", "2.weight")


def updated(*sizes: float, names: tuple[str, ...] = NAMES, **more: Any) -> dict[str, Any]:
    """The last probe, in a run that learned nothing."""
    count = len(sizes)
    found = {"probe.names": names[:count], "probe.weight_rms": (1.0,) * count, "probe.update_rms": sizes}
    return found | {"measured.touched": set(names), "measured.updated": set(names[1:count])} | more


@at_limits(
    At(
        signs.carries_over,
        {"loop.carried": 100},
        {"loop.carried": (5, 4), "loop.renewed": (99, 100), "opposed": (False, True)},
        also=(
            ({"loop.renewed": 14, "end": 0.7}, {"loop.renewed": 15, "end": 0.1}),
            ({"loop.renewed": 14, "end": 0.1}, {"loop.renewed": 15, "end": 0.1}),
            # updates that change nothing
            ({"end": 0.7}, {"end": 0.7, "probe.update_rms": (0.0,)}),
        ),
    ),
    At(
        signs.clears,
        {"loop.renewed": 256},
        {"loop.carried": (0, 1), "loop.renewed": (231, 230)},
        also=(({"updates": 2, "loop.renewed": 4}, {"updates": 2, "loop.renewed": 3}),),
    ),
    At(
        signs.lost_moments,
        {"warned": {"lost-moments": tally(finding("lost-moments"))}},
        {"warned": (..., {})},
        also=(
            ({}, {"end": 0.1}),
            ({"end": 0.1, "loop.emptied": 13}, {"end": 0.1, "loop.emptied": 12}),
            (
                {"end": 0.1, "warned": tallies("lost-moments", times=13)},
                {"end": 0.1, "warned": tallies("lost-moments", times=12)},
            ),
        ),
    ),
    At(signs.forgets, {"loop.emptied": 9}, {"loop.emptied": (3, 2)}),
    At(
        signs.clipped,
        {"warned": ("clip-rate",)},
        {"warned": (("clip-rate",), ("loss-spike",))},
        also=(
            ({"structure.scale_free": True}, {"structure.scale_free": True, "end": 0.9}),
            ({"end": 0.9}, {"structure.scale_free": True, "end": 0.9}),
            (
                {"structure.scale_free": True, "end": 0.9, "curve.best": 0.1},
                {"structure.scale_free": True, "end": 0.9, "curve.best": 0.9},
            ),
        ),
    ),
    At(
        signs.vanishing,
        {"warned": {"vanishing-gradient": tally(finding(value=1e-9))}},
        {"warned": [(..., {"vanishing-gradient": tally(finding(value=0.0))}), (..., {})]},
    ),
    At(
        signs.unreached,
        {"warned": {"zero-gradient": tally(finding(where=("0.weight", "0.bias")))}},
        {
            "warned": [
                ({"zero-gradient": tally(finding())}, {"zero-gradient": tally(finding(where=("0.bias", "2.bias")))}),
                (..., {}),
            ]
        },
    ),
    At(
        signs.done,
        {"losses": [0.0] * 256, "norms": [1.0] * 12 + [0.0] * 244},
        {"losses": ([1.0] * 7 + [0.0] * 249, [1.0] * 8 + [0.0] * 248), "measured.rewarded": (False, True)},
    ),
    At(signs.hardly_moves, {"highest_ratio": 1e-6}, {"target.variance": (1.0, 1.1), "highest_ratio": (9e-6, 1e-5)}),
    At(
        signs.drowned,
        {"ratio": 0.03, "curve.noise": 3.0},
        {"target.variance": (1.0, 1.1), "ratio": (..., None)},
        also=(({"start": 1.01}, {"start": 1.1}),),
    ),
    At(
        signs.always_zero,
        updated(0.0, 1.0, 1.0),
        {
            "measured.touched": (set(NAMES), {"1.weight", "2.weight"}),
            "measured.updated": [({"2.weight"}, set()), (..., set(NAMES))],
            "structure.rate_zero": ((), ("0.weight",)),
            "structure.half": (0, 1),
            "structure.coarse": (0, 1),
            "warned": (("loss-spike",), ("dead-units",)),
            "probe.weight_rms": (..., (0.0, 1.0, 1.0)),
            "end": (1.0, 0.7),
        },
        also=(
            ({}, updated(0.0, 1.0, 1.0, 1.0, names=(*NAMES, "3.weight"))),
            (updated(0.0, 0.01, 1.0), updated(0.0, 0.009, 1.0)),
            ({}, {"probe.names": ("0.bias", "1.bias", "2.weight")}),
            ({}, {"probe.modules": ("act",), "probe.dead": (1.0,)}),
        ),
    ),
    At(
        signs.guesses,
        {"kind": "", "ratio": 1e-3, "start": math.log(5), "end": math.log(5), "last.shape": (32, 5)},
        {"last.shape": [((32, 5), (32, 4)), ((32, 5, 7), (32, 7, 7)), ((32, 7, 5), (5, 4))]},
    ),
    At(
        signs.guesses,
        {"kind": "", "ratio": 1e-3, "start": math.log(2), "end": math.log(2), "last.shape": (32, 1)},
        {"last.shape": [((32,), (32, 3)), ((32, 2), (32, 4))]},
        also=(({"last.shape": (32, 3), "kind": "bce"}, {"last.shape": (32, 3)}),),
    ),
)
def test_it_is_said_at_its_limit_and_not_beyond(row: At) -> None:
    row.check()


def test_outputs_that_are_unknown_may_be_of_any_number_of_classes() -> None:
    level = {"kind": "", "ratio": 1e-3, "start": math.log(5), "end": math.log(5)}
    assert signs.guesses(run(level | {"trail.last": None}))


def test_losses_of_a_solved_task_are_zero_in_nearly_all_late_batches() -> None:
    for zeros, said in ((116, True), (115, False)):  # of 128
        norms = [0.0] * 128 + [1.0] * (128 - zeros) + [0.0] * zeros
        assert bool(signs.done(run(losses=[0.0] * 256, norms=norms))) is said
