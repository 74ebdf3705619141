"""How often, and how far, gradients are above the limit they are clipped to."""

import math
from collections.abc import Callable

import pytest

from steadystep.detectors.clip_rate import ClipRate
from steadystep.errors import ConfigError
from steadystep.records import Signals
from tests.unit.detectors.feeding import fed, rows, said


def clip(**settings: object) -> Callable[[], ClipRate]:
    return lambda: ClipRate(2.0, **settings)  # type: ignore[arg-type]


def shares(*parts: tuple[float, int]) -> list[float]:
    """A block of 100 norms: so many of each size, the rest far below the limit."""
    found = [norm for norm, count in parts for _ in range(count)]
    return found + [0.1] * (100 - len(found))


def blocks(*norms: list[float], losses: list[float] | float = 1.0, **more: object) -> list[Signals]:
    """One block after the other; a loss for each block."""
    flat = [norm for block in norms for norm in block]
    levels = losses if isinstance(losses, list) else [losses] * len(norms)
    return rows(grad_norm=flat, loss=[loss for loss in levels for _ in range(100)], **more)


FAR = shares((20.1, 100))


def test_the_limit_is_above_zero() -> None:
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError):
            ClipRate(bad)


@pytest.mark.parametrize(("clipped", "told"), [(10, False), (11, True), (100, True)])
def test_more_than_a_tenth_is_a_note(clipped: int, told: bool) -> None:
    found = fed(clip(), blocks(shares((2.1, clipped))))
    assert [(f.step, f.severity, f.value, f.limit) for f in found] == (
        [(99, "info", clipped / 100, 0.1)] if told else []
    )


def test_what_is_at_the_limit_is_not_clipped() -> None:
    assert fed(clip(), blocks(shares((2.0, 100)))) == []


def test_norms_that_are_not_finite_do_not_count() -> None:
    stream = blocks(shares((math.inf, 60), (math.nan, 20)), shares((2.1, 11)))
    assert said(fed(clip(), stream)) == [(179, "info")]


@pytest.mark.parametrize(
    ("quiet", "steps"), [(1, [99, 199, 299, 399, 499]), (200, [99, 299, 499]), (299, [99, 299, 499])]
)
def test_a_note_is_repeated_after_quiet_steps(quiet: int, steps: list[int]) -> None:
    stream = blocks(*[shares((2.1, 50))] * 5)
    assert [f.step for f in fed(clip(quiet_steps=quiet), stream)] == steps


def test_by_default_once_in_5000_steps() -> None:
    detector = ClipRate(2.0)
    stream = blocks(*[shares((2.1, 50))] * 52)
    assert [f.step for signals in stream for f in detector.update(signals)] == [99, 5099]


class TestFarAbove:
    @pytest.mark.parametrize(
        ("block", "at"),
        [
            (FAR, 199),
            (shares((20.1, 51), (10.1, 44)), 199),
            (shares((20.1, 51), (10.1, 43)), 999),  # not nearly all are five times the limit
            (shares((20.1, 51), (10.0, 49)), 999),
            (shares((20.1, 50), (10.1, 50)), None),  # not most are ten times
            (shares((20.0, 100)), None),
        ],
    )
    def test_a_warning_once_when_most_are_cut_to_less_than_a_tenth(self, block: list[float], at: int | None) -> None:
        found = [f for f in fed(clip(), blocks(*[block] * 12)) if f.severity == "warn"]
        assert [(f.step, f.limit) for f in found] == ([] if at is None else [(at, 0.5)])
        assert all(f.value == sum(norm > 20.0 for norm in block) / 100 for f in found)

    def test_the_value_is_the_share_of_the_last_five_blocks(self) -> None:
        some = shares((20.1, 60))
        found = fed(clip(), blocks(*[FAR] + [some] * 4 + [FAR] * 4 + [some]))
        assert [(f.step, f.value) for f in found if f.severity == "warn"] == [(999, 0.92)]
        (found,) = [f for f in fed(clip(), blocks(FAR, shares((20.1, 96)))) if f.severity == "warn"]
        assert found.value == 0.98

    @pytest.mark.parametrize("calm", [0, 4, 8])
    def test_only_where_it_has_been_so_from_the_start(self, calm: int) -> None:
        order = [FAR] * 14
        order[calm] = shares((20.1, 50))
        found = fed(clip(), blocks(*order))
        assert [f.step for f in found if f.severity == "warn"] == ([] if calm < 2 else [199])

    def test_one_block_with_fewer_makes_it_wait_for_a_thousand_steps(self) -> None:
        found = fed(clip(), blocks(shares((20.1, 94)), *[FAR] * 10))
        assert [f.step for f in found if f.severity == "warn"] == [999]

    def test_it_takes_the_place_of_the_note(self) -> None:
        assert said(fed(clip(quiet_steps=100), blocks(FAR, FAR, FAR))) == [(99, "info"), (199, "warn"), (299, "info")]


class TestScaleFree:
    def test_a_note_for_optimizers_that_divide_by_the_gradient(self) -> None:
        found = fed(clip(scale_free=True), blocks(*[FAR] * 12))
        assert said(found) == [(99, "info"), (199, "info")]
        assert found[1].limit == 0.5

    def test_a_warning_where_the_loss_falls_early(self) -> None:
        stream = blocks(FAR, FAR, losses=[2.0, 1.0])
        assert said(fed(clip(scale_free=True), stream))[1] == (199, "warn")

    @pytest.mark.parametrize(("falls_at", "told"), [(4, True), (5, False)])
    def test_early_is_within_500_steps_and_the_note_does_not_stand_in_the_way(self, falls_at: int, told: bool) -> None:
        losses = [2.0] * falls_at + [1.0] * (8 - falls_at)
        found = fed(clip(scale_free=True), blocks(*[FAR] * 8, losses=losses))
        assert said(found)[1:] == [(199, "info")] + ([(499, "warn")] if told else [])

    @pytest.mark.parametrize("where", [{"names": ("actor.0.weight",)}, {"metrics": {"train/entropy": 1.0}}])
    def test_a_policy_is_left_alone(self, where: dict[str, object]) -> None:
        stream = blocks(FAR, FAR, losses=[2.0, 1.0], **where)
        assert said(fed(clip(scale_free=True), stream)) == [(99, "info"), (199, "info")]
        other = {"names": ("body.weight",), "metrics": {"accuracy": 1.0}}
        assert said(fed(clip(scale_free=True), blocks(FAR, FAR, losses=[2.0, 1.0], **other)))[1] == (199, "warn")

    def block(self, spread: float, level: float, *, bad: int = 0) -> list[float]:
        """Losses around a level; the first are none."""
        return [math.nan] * bad + [level + spread * (-1) ** i for i in range(100 - bad)]

    @pytest.mark.parametrize(
        ("first", "second", "told"),
        [
            ((0.0, 2.0, 0), (0.25, 1.5, 0), False),  # no more than twice what it scatters
            ((0.0, 2.0, 0), (0.25, 1.4375, 0), True),
            ((9.0, 10.0, 0), (0.25, 1.4375, 0), True),
            ((0.0, 2.0, 0), (0.0, 2.0, 0), False),
            ((0.0, 2.0, 0), (0.0, 3.0, 0), False),
            ((0.0, 2.0, 50), (0.0, 1.0, 50), True),
            ((0.0, 2.0, 51), (0.0, 1.0, 0), False),  # too few losses
            ((0.0, 2.0, 0), (0.0, 1.0, 51), False),
            ((2.0, 2.0, 0), (0.0, 1.0, 0), False),  # a loss of zero has no level
            ((0.0, 2.0, 0), (1.0, 0.5, 0), False),
            ((0.0, 2.0, 0), (0.0, -1.0, 0), False),
        ],
    )
    def test_what_counts_as_falling(
        self, first: tuple[float, float, int], second: tuple[float, float, int], told: bool
    ) -> None:
        losses = [loss for spread, level, bad in (first, second) for loss in self.block(spread, level, bad=bad)]
        found = fed(clip(scale_free=True), rows(grad_norm=[*FAR, *FAR], loss=losses))
        assert said(found)[-1] == (199, "warn" if told else "info")

    @pytest.mark.parametrize(("norm", "told"), [(42.0, True), (43.0, False)])
    def test_not_while_the_norms_grow(self, norm: float, told: bool) -> None:
        stream = blocks(shares((21.0, 100)), shares((norm, 100)), losses=[2.0, 1.0])
        assert said(fed(clip(scale_free=True), stream))[1] == (199, "warn" if told else "info")

    def test_numbers_beyond_all_squares_are_no_reason_to_raise(self) -> None:
        stream = rows(200, grad_norm=1e308, loss=[1e300, -1e300] * 100)
        assert said(fed(clip(scale_free=True), stream)) == [(99, "info"), (199, "info")]


def test_states_from_before_the_levels_are_read() -> None:
    detector = ClipRate(2.0)
    old = {"steps": 3, "clipped": 2, "far": 1, "blocks": 4, "rest": 5, "warned": True, "recent": [7]}
    detector.load_state_dict(old)
    state = detector.state_dict()
    assert {key: state[key] for key in old} == old
    assert (state["said"], state["much"], state["since_the_start"]) == ("warn", 0, [False, False])
    assert state["levels"] == [[0, 1, 0.0, 0.0, 0.0]] * 2
    detector.load_state_dict(old | {"warned": False})
    assert detector.state_dict()["said"] == ""
