"""Every detector keeps the contract, and the contract notices those that do not."""

import functools
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.config import Config
from steadystep.detectors import (
    AttentionLogitGrowth,
    BadAdvantages,
    BitFlips,
    DamagedState,
    DeadGroups,
    DeadUnits,
    Detector,
    EmbeddingGrowth,
    EntropyCollapse,
    FlatReward,
    GradientSpike,
    KlBlowUp,
    LearningRateCreep,
    LearningRateJump,
    LossSpike,
    LostMoments,
    MetricBounds,
    Miscomputations,
    NonFinite,
    NotHealing,
    PoisonedMoments,
    PolicyMismatch,
    RatioExplosion,
    RewardCollapse,
    RewardHacking,
    RmsSurprise,
    SaturatedUnits,
    ShortWarmup,
    SlowDivergence,
    UpdateRatio,
    ValueDivergence,
    VanishingGradient,
    WorseThanBest,
    ZeroGradient,
)
from steadystep.detectors.build import build_detectors
from steadystep.detectors.clip_rate import ClipRate
from steadystep.detectors.corruption import WeightJump
from steadystep.detectors.detector import Cooldown
from steadystep.detectors.divergence import EarlyDivergence
from steadystep.detectors.gradient_build_up import GrowingGradient
from steadystep.detectors.inputs import InputScale, LearningRateBounds, SameBatch
from steadystep.detectors.no_learning import ConstantPrediction, NoLearning
from steadystep.detectors.non_finite import BufferJump, LossScale
from steadystep.detectors.oscillation import Oscillation
from steadystep.detectors.vanishing_gradient import SuspiciousPerfection
from steadystep.records import Finding, Probe, Signals
from steadystep.testing import check_detector, signal_streams

# A new detector is added here, with arguments that let it speak within 400 steps.
FACTORIES: dict[str, Callable[[], Detector]] = {
    "non-finite": NonFinite,
    "cooldown": lambda: Cooldown(Oscillation(quiet_steps=1), quiet_steps=128),
    "rationed": lambda: Cooldown(WorseThanBest(), quiet_steps=128, as_notes=True),
    "oscillation": lambda: Oscillation(quiet_steps=100),
    "growing-gradient": GrowingGradient,
    "early-divergence": EarlyDivergence,
    "clip-rate": lambda: ClipRate(1.0, quiet_steps=100),
    "loss-scale": lambda: LossScale(quiet_steps=20),
    "no-learning": NoLearning,
    "suspicious-perfection": SuspiciousPerfection,
    "learning-rate-bounds": lambda: LearningRateBounds(1e-4, 5e-3),
    "gradient-spike": GradientSpike,
    "loss-spike": LossSpike,
    "lost-moments": lambda: LostMoments(beta2=0.999),
    "slow-divergence": SlowDivergence,
    "worse-than-best": WorseThanBest,
}
# These speak of probes and of long stretches, which their own tests have.
SILENT: dict[str, Callable[[], Detector]] = {
    "bit-flip": BitFlips,
    "miscomputation": Miscomputations,
    "kl-blow-up": KlBlowUp,
    "bad-advantages": BadAdvantages,
    "dead-groups": DeadGroups,
    "policy-mismatch": PolicyMismatch,
    "ratio-explosion": RatioExplosion,
    "reward-collapse": RewardCollapse,
    "reward-hacking": RewardHacking,
    "value-divergence": ValueDivergence,
    "entropy-collapse": EntropyCollapse,
    "flat-reward": FlatReward,
    "metric-bounds": MetricBounds,
    "not-healing": NotHealing,
    "constant-prediction": ConstantPrediction,
    "buffer-jump": BufferJump,
    "input-scale": InputScale,
    "same-batch": SameBatch,
    "weight-jump": WeightJump,
    "damaged-state": DamagedState,
    "learning-rate-creep": LearningRateCreep,
    "learning-rate-jump": LearningRateJump,
    "short-warmup": lambda: ShortWarmup(beta2=0.999),
    "update-ratio": UpdateRatio,
    "poisoned-moments": PoisonedMoments,
    "rms-surprise": RmsSurprise,
    "dead-units": DeadUnits,
    "saturated-units": SaturatedUnits,
    "embedding-growth": EmbeddingGrowth,
    "attention-logit-growth": AttentionLogitGrowth,
    "vanishing-gradient": VanishingGradient,
}


same_streams = functools.cache(signal_streams)


@pytest.mark.parametrize("name", FACTORIES | SILENT)
def test_ours_keep_the_contract(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadystep.testing.signal_streams", same_streams)  # made once for all of them
    check_detector((FACTORIES | SILENT)[name], steps=400 if name in FACTORIES else 150)


def test_the_streams_make_each_of_them_speak() -> None:
    """A contract proved on silence proves nothing."""
    streams = signal_streams(steps=400)
    for name, make in FACTORIES.items():
        detectors = [(make(), stream) for stream in streams.values()]
        assert any(detector.update(signals) for detector, stream in detectors for signals in stream), name


EVERYTHING = {
    "training": {"max_grad_norm": 1.0, "mixed_precision": "fp16"},
    "monitoring": {"lr_min": 1e-4, "lr_max": 5e-3},
}
NAMES = tuple(f"{i}.weight" for i in range(8))
STEPS = 2400


def rhythm(name: str, period: int, bad_share: float) -> Iterator[Signals]:
    """A run in which one thing goes wrong for a share of every period, and is well again in between."""
    rng = random.Random(period)
    for step in range(STEPS):
        turn, phase = divmod(step, period)
        bad = step >= 200 and phase < bad_share * period
        loss = 1.0 + math.exp(-step / 100) + 0.01 * rng.gauss(0, 1)
        norms, lr, scale = [1.0] * 8, 1e-3, 1024.0
        metrics = {"kl": 0.02, "entropy": 2.0, "reward": rng.random(), "reward_std": 0.5, "accuracy": 0.5}
        fields: dict[str, Any] = {"batch_rms": rng.random()}
        probed: dict[str, Any] = {"dead": [0.0] * 8, "row_norms": [1.0] * 8, "logit_bounds": [1.0] * 8}
        if bad and name == "loss":
            loss += 0.4
        elif bad and name == "wild loss":
            loss += 3.0 * rng.random()
        elif bad and name == "staircase":
            loss += 0.2 * (turn % 40)
        elif bad and name == "zero gradient":
            norms = [0.0] * 8
        elif bad and name == "one tensor after another":
            norms[turn % 8] = 0.0
        elif bad and name == "vanishing":
            norms = [1e-7] * 4 + [1.0] * 4
        elif bad and name == "spikes":
            norms = [100.0] * 8
        elif bad and name == "metrics":
            metrics = {"kl": 9.0, "entropy": 1e-3, "reward": 0.0, "reward_std": 0.0, "accuracy": math.nan}
        elif bad and name == "same batch":
            fields["batch_rms"] = 0.5
        elif bad and name == "learning rate":
            lr = rng.choice([1e-5, 1e-2, 0.3])
        elif bad and name == "scale":
            scale = 0.5 ** (step % 16)
        elif bad and name == "layers":
            size = 100.0 * (1.0 + step)
            for key, value in (("dead", 1.0), ("row_norms", size), ("logit_bounds", size)):
                probed[key][turn % 8] = value
            loss += 2.0
        if name == "weights" and step % 20 == 0:
            sizes = tuple(100.0 if bad and i == turn % 8 else 1.0 for i in range(8))
            fields |= {"weights": NAMES, "weight_norms": sizes}
        if step % 16 == 0:
            rows = {key: tuple(values) for key, values in probed.items()}
            rows |= {"modules": NAMES, "tables": NAMES, "attentions": NAMES, "saturated": rows["dead"]}
            fields["probe"] = Probe(step=step, **rows)
        yield Signals(
            step=step,
            loss=loss,
            grad_norm=math.hypot(*norms),
            norms=tuple(norms),
            names=NAMES,
            lr=lr,
            scale=scale,
            scaled=True,
            metrics=metrics,
            **fields,
        )


# Its warnings are questions: the judge compares weights before anything is said (judge.py), and says it once a while.
QUESTIONS = ("not-healing",)
RHYTHMS = ("loss", "wild loss", "staircase", "zero gradient", "one tensor after another", "vanishing", "spikes")
RHYTHMS += ("metrics", "same batch", "learning rate", "scale", "layers", "weights")


FEW = ((2, 0.9), (18, 0.25), (80, 0.9), (80, 0.25))
ALL = tuple(itertools.product((2, 10, 18, 70, 80, 160, 250), (0.9, 0.5, 0.25)))


@pytest.mark.parametrize("grid", [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RHYTHMS)
def test_no_detector_warns_again_and_again(name: str, grid: tuple[tuple[int, float], ...]) -> None:
    """What comes and goes all the time is said three times in 1,000 steps, at most, by each detector."""
    for period, share in grid:
        watching = [d for d in build_detectors(Config.load(EVERYTHING), beta2=0.999) if d.name not in QUESTIONS]
        said: dict[str, list[int]] = {}
        for signals in rhythm(name, period, share):
            for detector in watching:
                for finding in detector.update(signals):
                    if finding.severity == "warn":
                        said.setdefault(finding.detector, []).append(signals.step)
        for detector, steps in said.items():
            crowded = [a for a, b in zip(steps, steps[3:], strict=False) if b - a < 1000]
            assert not crowded, f"{detector}, {share:.0%} of every {period} steps: {steps}"


def test_a_cooldown_makes_notes_of_what_comes_too_soon() -> None:
    inner = ["info", "warn", "warn", "act", "warn", "warn"]

    class Says:
        name = "says"

        def update(self, signals: Signals) -> tuple[Finding, ...]:
            severity: Any = inner[signals.step]
            return (Finding(detector="says", step=signals.step, severity=severity, value=1.0, limit=0.0),)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    quiet = Cooldown(Says(), quiet_steps=4, as_notes=True)
    found = [quiet.update(Signals(step=step, loss=1.0, grad_norm=1.0))[0].severity for step in range(6)]
    assert found == ["info", "warn", "info", "act", "info", "warn"]


def test_a_cooldown_takes_the_state_of_what_it_wraps() -> None:
    """Written before there was a cooldown."""
    bare = ZeroGradient()
    for step in range(5):
        bare.update(Signals(step=step, loss=1.0, grad_norm=0.0))
    wrapped = Cooldown(ZeroGradient(), quiet_steps=10, as_notes=True)
    wrapped.load_state_dict(bare.state_dict())
    assert wrapped.state_dict()["inner"] == bare.state_dict()


numbers = st.floats() | st.sampled_from([0.0, 1.0, 1.0, 2.0, math.nan, math.inf])
curve = st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), max_size=150)


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
@given(curve, st.integers(0, 150))
def test_resume_is_invisible_whatever_the_numbers(
    make: Callable[[], Detector], values: list[tuple[float, float, float, bool]], cut: int
) -> None:
    stream = [
        Signals(step=i, loss=loss, grad_norm=abs(norm), lr=lr, scale=lr, scaled=scaled)
        for i, (loss, norm, lr, scaled) in enumerate(values)
    ]
    whole, first, second = make(), make(), make()
    expected = [whole.update(signals) for signals in stream]
    got = [first.update(signals) for signals in stream[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    got += [second.update(signals) for signals in stream[cut:]]
    assert repr(expected) == repr(got)


def test_streams_are_the_same_for_the_same_seed() -> None:
    assert repr(signal_streams(steps=60)) == repr(signal_streams(steps=60))
    assert repr(signal_streams(steps=60)) != repr(signal_streams(steps=60, seed=1))


def test_streams_hold_what_a_detector_may_meet() -> None:
    streams = signal_streams()
    everything = [signals for stream in streams.values() for signals in stream]
    for odd in (
        lambda s: math.isnan(s.loss),
        lambda s: math.isinf(s.grad_norm),
        lambda s: math.isnan(s.lr),
        lambda s: not s.norms,
        lambda s: s.probe is not None,
        lambda s: s.inputs is not None,
        lambda s: s.counterfactual is not None,
        lambda s: bool(s.metrics),
        lambda s: s.scaled,
        lambda s: bool(s.bad_buffers),
        lambda s: s.loss < 0.0,
        lambda s: s.loss > 1e300,
    ):
        assert any(odd(s) for s in everything)
    assert all(
        [s.step for s in stream] == list(range(stream[0].step, stream[0].step + len(stream)))
        for stream in streams.values()
    )
    assert all(s.all_finite for s in streams["healthy"])
    assert all(Signals.from_json(s.to_json()).to_json() == s.to_json() for s in everything[::50])


class Honest:
    """Says when the loss is above the mean of those before; subclassed here only to break one promise at a time."""

    name = "honest"

    def __init__(self) -> None:
        self.losses: list[float] = []

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        if not math.isfinite(signals.loss):
            return ()
        self.losses.append(signals.loss / 8)
        limit = sum(self.losses[-8:])
        return (self.finding(signals, limit),) if signals.loss > limit else ()

    def finding(self, signals: Signals, limit: float, **changes: Any) -> Finding:
        plain = {"detector": self.name, "step": signals.step, "severity": "info", "value": signals.loss}
        return Finding(**plain | {"limit": limit} | changes)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses[-8:]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def test_an_honest_one_passes() -> None:
    check_detector(Honest, steps=60)


class Nameless(Honest):
    name = ""


class Renamed(Honest):
    def update(self, signals: Signals) -> tuple[Finding, ...]:
        self.name = f"at {signals.step}"
        return ()


class EachOther(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.name = f"{id(self)} {random.random()}"


class Raises(Honest):
    def update(self, signals: Signals) -> tuple[Finding, ...]:
        signals.loss**2
        return ()


class Lists(Honest):
    def update(self, signals: Signals) -> Any:
        return []


class Words(Honest):
    def update(self, signals: Signals) -> Any:
        return ("the loss is high",)


class Louder(Honest):
    def finding(self, signals: Signals, limit: float, **changes: Any) -> Finding:
        return super().finding(signals, limit, severity="loud")


class OtherStep(Honest):
    def finding(self, signals: Signals, limit: float, **changes: Any) -> Finding:
        return super().finding(signals, limit, step=0)


class OtherName(Honest):
    def finding(self, signals: Signals, limit: float, **changes: Any) -> Finding:
        return super().finding(signals, limit, detector="somebody")


class NoNumber(Honest):
    def finding(self, signals: Signals, limit: float, **changes: Any) -> Finding:
        return super().finding(signals, limit, value=None)


class Prophet(Honest):
    def finding(self, signals: Signals, limit: float, **changes: Any) -> Finding:
        return super().finding(signals, limit, since=signals.step + 1)


class Lister(Honest):
    def finding(self, signals: Signals, limit: float, **changes: Any) -> Finding:
        return super().finding(signals, limit, where=["a"])


class Dice(Honest):
    def finding(self, signals: Signals, limit: float, **changes: Any) -> Finding:
        return super().finding(signals, limit, value=random.random())


class Shared(Honest):
    everything: list[float] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.losses = self.everything

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Forgetful(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = []


class Half(Honest):
    """Adds to what it has, instead of replacing it: right only in a fresh one."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = [*state["losses"], *self.losses]


class NotJson(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {"losses": tuple(self.losses)}


class Infinite(Honest):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"best": math.inf}


class Alias(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}


class Borrower(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


class Resetting(Honest):
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        self.losses = []
        return state


class Picky(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.losses:
            raise ValueError("already in use")
        super().load_state_dict(state)


class Scribbler(Honest):
    def update(self, signals: Signals) -> tuple[Finding, ...]:
        if isinstance(signals.metrics, dict):
            signals.metrics["seen"] = 1.0
        return ()


class Poisoned(Honest):
    """Takes a NaN for a loss of zero."""

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        if math.isnan(signals.loss):
            self.losses.append(0.0)
        return super().update(signals)


COMPLAINTS: dict[Callable[[], Detector], str] = {
    Nameless: "non-empty",
    Renamed: "name changed",
    EachOther: "name must not change",
    Raises: "update raised OverflowError",
    Lists: "must return a tuple",
    Words: "not a Finding",
    Louder: "severity must be one of",
    OtherStep: "step must be",
    OtherName: "detector must be 'honest'",
    NoNumber: "must be numbers",
    Prophet: "since must be",
    Lister: "tuple of strings",
    Dice: "a second one of its kind",
    Shared: "a second one of its kind",
    Forgetful: "a fresh one, it continues differently",
    Half: "a used one, it continues differently",
    NotJson: "does not survive JSON",
    Infinite: "not JSON",
    Alias: "state_dict must copy: its result",
    Borrower: "load_state_dict must copy",
    Resetting: "calling state_dict before step .* changed it",
    Picky: "load_state_dict raised ValueError",
    Scribbler: "changed the signals",
    Poisoned: "of NaN before step .* were learned",
}


def test_a_broken_promise_is_told() -> None:
    for broken, complaint in COMPLAINTS.items():
        with pytest.raises(AssertionError, match=complaint):
            check_detector(broken, steps=60)


def test_the_complaint_says_where() -> None:
    with pytest.raises(AssertionError, match=r"stream 'rubbish', step \d+: update raised OverflowError"):
        check_detector(Raises, steps=60)


def test_one_that_counts_steps_may_say_so() -> None:
    check_detector(Poisoned, steps=60, nan_leaves_no_trace=False)
