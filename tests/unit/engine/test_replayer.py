"""Which updates are replayed and how far, with an updater and a runner that only take notes."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadystep._utils.rng import RngState
from steadystep.engine.closures import BatchClosure
from steadystep.engine.replay import Replayed, Replayer, _Usual
from steadystep.records import Finding, Probe, Signals
from steadystep.snapshots.replay_buffer import RecordedMicroBatch, RecordedUpdate

CPU = torch.device("cpu")


def signals(step: int, **fields: Any) -> Signals:
    plain: dict[str, Any] = {"loss": 1.0, "losses": (1.0,), "grad_norm": 1.0, "norms": (1.0,), "lr": 0.1}
    return Signals(step=step, **plain | fields)


def update(step: int, *, at_hand: bool = False, rngs: tuple[Any, ...] = (None,), **fields: Any) -> RecordedUpdate:
    passes = tuple(RecordedMicroBatch(BatchClosure(step_of(step), step, rng), 2.0) for rng in rngs)
    return RecordedUpdate(passes, signals(step, **fields), ({"lr": 0.1},), None, 0 if at_hand else step + 1)


def step_of(step: int) -> Any:
    return lambda batch: (step, batch)


class Hears:
    def __init__(self, name: str, *, every: bool = True) -> None:
        self.name, self.seen, self.every_step = name, [], every

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        self.seen.append(signals)
        return ()


@dataclass
class Replays:
    """A replay in which the update of each step comes out as `now` says; as it was without an entry."""

    now: dict[int, dict[str, Any]] = field(default_factory=dict)
    raises: int | None = None
    as_it_was: bool = True
    draws: bool = False
    log: list[Any] = field(default_factory=list)
    detector: Hears = field(default_factory=lambda: Hears("hears"))

    def add(self, closure: Any, *, batch: Any, weight: Any) -> None:
        step, given = closure(batch)
        assert (step, weight) == (given, 2.0)
        if step == self.raises:
            raise KeyError
        if self.draws:
            torch.rand(1)
        self.log.append(("run", step))

    def measure(self, kept: Any) -> Any:
        step = self.log[-1][1]
        self.log.append(("measured", len(kept)))
        return SimpleNamespace(signals=signals(step, **self.now.get(step, {})))

    def take_again(self, seen: Any, done: RecordedUpdate) -> None:
        self.log.append(("taken", done.signals.step))

    def undo(self) -> None:
        self.log.append(("undo",))

    def follow(self) -> None:
        self.log.append(("follow",))

    def is_as_it_was(self, updates: int) -> bool:
        self.log.append(("compared", updates))
        return self.as_it_was

    def replay(self, missed: list[RecordedUpdate], **more: Any) -> Replayed:
        me: Any = self
        replayer = Replayer(runner=me, updater=me, recovery=me, detectors=(self.detector,), device=CPU)  # type: ignore[arg-type]
        return replayer.replay(missed, self.measure, **more)

    def of(self, kind: str) -> list[Any]:
        return [entry[1] for entry in self.log if entry[0] == kind]


STEPS = [update(step) for step in range(10, 18)]


def made(replayed: Replayed) -> list[int]:
    return [done.signals.step for done in replayed.updates]


class TestHowFar:
    def test_what_goes_as_it_went_ends_before_the_first_sign(self) -> None:
        for sign, slack, outside, last in (
            (14, 0, False, 13),
            (14, 2, False, 15),
            (14, 0, True, 17),
            (30, 0, False, 17),
        ):
            run = Replays()
            replayed = run.replay(STEPS, first_sign=sign, slack=slack, outside=outside)
            assert made(replayed) == list(range(10, last + 1)) == run.of("taken")
            assert not replayed.healed
            assert (("undo",) in run.log) is (last < 17)
            assert run.log.count(("follow",)) == len(made(replayed))

    def test_what_goes_better_is_replayed_to_the_end(self) -> None:
        run = Replays({15: {"loss": 0.5, "losses": (0.5,)}})
        replayed = run.replay(STEPS, first_sign=15)
        assert made(replayed) == list(range(10, 18))
        assert replayed.healed
        assert [done.signals.loss for done in replayed.updates] == [1.0] * 5 + [0.5] + [1.0] * 2
        assert [seen.loss for seen in run.detector.seen] == [1.0] * 5 + [0.5] + [1.0] * 2

    def test_the_first_three_must_go_as_they_went(self) -> None:
        for odd, count in ((10, 0), (11, 0), (12, 0), (13, 8)):
            replayed = Replays({odd: {"loss": 0.9, "losses": (0.9,)}}).replay(STEPS, first_sign=30)
            assert len(made(replayed)) == (count or odd - 10), odd
            assert replayed.healed

    def test_what_goes_worse_ends_it(self) -> None:
        run = Replays({15: {"loss": 0.5}, 16: {"loss": 3.0}})
        replayed = run.replay(STEPS, first_sign=15)
        assert made(replayed) == [10, 11, 12, 13, 14, 15]
        assert run.log[-1] == ("undo",)

    def test_what_raises_or_is_not_finite_ends_it(self) -> None:
        for run in (
            Replays(raises=14),
            Replays({14: {"loss": float("nan")}}),
            Replays({14: {"grad_norm": float("inf")}}),
        ):
            replayed = run.replay(STEPS, first_sign=30)
            assert made(replayed) == [10, 11, 12, 13]
            assert replayed.healed
            assert not replayed.exact
            assert run.log[-1] == ("undo",)

    def test_after_the_one_at_hand_the_loop_follows(self) -> None:
        run = Replays()
        replayed = run.replay([*STEPS[:3], update(13, at_hand=True)], first_sign=30)
        assert len(made(replayed)) == 4
        assert run.log.count(("follow",)) == 3

    def test_all_passes_of_an_update_are_run(self) -> None:
        run = Replays()
        run.replay([update(10, rngs=(None, None))], first_sign=30)
        assert run.of("run") == [10, 10]
        assert run.of("measured") == [2]


class TestExact:
    def test_bit_for_bit_up_to_the_first_sign(self) -> None:
        run = Replays()
        assert run.replay(STEPS, first_sign=14).exact
        assert run.of("compared") == [11, 12, 13, 14]

    def test_it_takes_three(self) -> None:
        for sign, exact in ((12, False), (13, True), (14, True)):
            assert Replays().replay(STEPS, first_sign=sign).exact is exact
        assert not Replays().replay(STEPS[:2], first_sign=30).exact
        assert Replays().replay(STEPS[:3], first_sign=30).exact

    def test_another_bit_before_the_sign_counts_and_after_it_does_not(self) -> None:
        hardly = {"losses": (1.0 + 1e-9,)}
        for odd, exact in ((10, False), (13, False), (14, True), (15, True)):
            replayed = Replays({odd: hardly}).replay(STEPS, first_sign=14, outside=True)
            assert len(made(replayed)) == 8
            assert replayed.exact is exact, odd

    def test_a_younger_state_that_differs_counts_and_is_asked_for_once(self) -> None:
        run = Replays(as_it_was=False)
        assert not run.replay(STEPS, first_sign=14).exact
        assert run.of("compared") == [11]

    def test_not_where_it_ended_too_soon(self) -> None:
        assert not Replays({13: {"loss": 5.0}}).replay(STEPS, first_sign=15).exact


class TestRandomNumbers:
    @pytest.mark.parametrize(
        ("rngs", "at_hand", "stay"),
        [
            ((True,), False, True),
            ((False,), True, True),
            ((True,), True, False),
            ((True, False), True, True),
            ((False, True), True, False),
        ],
    )
    def test_they_are_those_of_the_loop_unless_its_own_update_drew(
        self, rngs: tuple[bool, ...], at_hand: bool, stay: bool
    ) -> None:
        state = RngState(CPU)
        given = tuple(state if drawn else None for drawn in rngs)
        last = update(13, at_hand=at_hand, rngs=given)
        torch.rand(5)
        before = torch.get_rng_state()
        assert len(made(Replays(draws=True).replay([*STEPS[:3], last], first_sign=30))) == 4
        assert torch.equal(torch.get_rng_state(), before) is stay

    def test_nothing_was_made(self) -> None:
        before = torch.get_rng_state()
        Replays(draws=True, raises=10).replay([update(10, at_hand=True, rngs=(RngState(CPU),))], first_sign=30)
        assert torch.equal(torch.get_rng_state(), before)


def test_detectors_of_probes_learn_from_probes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadystep.engine.replay.sees_every_step", lambda detector: detector.every_step)
    for every, seen in ((True, [10, 11]), (False, [11])):
        run = Replays(detector=Hears("hears", every=every))
        run.replay([update(10), update(11, probe=Probe(step=11))], first_sign=30)
        assert [each.step for each in run.detector.seen] == seen


class TestUsual:
    """The largest loss and norm before the first sign are the measure."""

    missed = (
        update(10, loss=2.0, grad_norm=1.0),
        update(11, loss=1.0, grad_norm=3.0),
        update(12, loss=50.0, grad_norm=60.0),
    )

    def test_no_worse_than_others_or_than_it_went(self) -> None:
        usual = _Usual(self.missed, 12)
        for then, now, covered in (
            ({"loss": 1.0, "grad_norm": 1.0}, {"loss": 2.0, "grad_norm": 6.0}, True),
            ({"loss": 1.0, "grad_norm": 1.0}, {"loss": 2.01, "grad_norm": 6.0}, False),
            ({"loss": 1.0, "grad_norm": 1.0}, {"loss": 2.0, "grad_norm": 6.01}, False),
            ({"loss": 10.0, "grad_norm": 5.0}, {"loss": 10.2, "grad_norm": 10.0}, True),
            ({"loss": 10.0, "grad_norm": 5.0}, {"loss": 10.21, "grad_norm": 10.0}, False),
            ({"loss": 10.0, "grad_norm": 5.0}, {"loss": 10.2, "grad_norm": 10.1}, False),
            ({"loss": float("nan"), "grad_norm": 1.0}, {"loss": 4.0, "grad_norm": 12.0}, True),
            ({"loss": float("nan"), "grad_norm": 1.0}, {"loss": 4.1, "grad_norm": 12.0}, False),
            ({"loss": float("nan"), "grad_norm": 1.0}, {"loss": 4.0, "grad_norm": 12.1}, False),
        ):
            seen: Any = SimpleNamespace(signals=signals(13, **now))
            assert usual.covers(seen, update(13, **then)) is covered, (then, now)

    def test_a_negative_loss_has_room_too(self) -> None:
        usual = _Usual([update(10, loss=-10.0)], 12)
        for loss, covered in ((-9.8, True), (-9.7, False)):
            seen: Any = SimpleNamespace(signals=signals(13, loss=loss))
            assert usual.covers(seen, update(13, loss=-10.0)) is covered
        for loss, covered in ((0.0, True), (0.1, False)):
            seen = SimpleNamespace(signals=signals(13, loss=loss))
            assert usual.covers(seen, update(13, loss=float("nan"))) is covered

    def test_with_none_before_the_sign_the_first_is_taken(self) -> None:
        usual = _Usual(self.missed, 10)
        seen: Any = SimpleNamespace(signals=signals(13, loss=2.0, grad_norm=2.0))
        assert usual.covers(seen, update(13, loss=1.0, grad_norm=1.0))
        seen = SimpleNamespace(signals=signals(13, loss=2.1, grad_norm=2.0))
        assert not usual.covers(seen, update(13, loss=1.0, grad_norm=1.0))
