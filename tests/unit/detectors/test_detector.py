"""What wraps and counts for detectors: who is asked, cooldowns, runs."""

from collections.abc import Mapping
from typing import Any

import pytest

from steadystep.config import Config
from steadystep.detectors import Detector
from steadystep.detectors.build import beta2_of, build_detectors, decay_of, is_scale_free
from steadystep.detectors.detector import Cooldown, Runs, has_what_it_needs, occasional, sees_every_step
from steadystep.records import BitFlip, Finding, Miscomputation, Probe, Signals
from tests.unit.detectors.feeding import row, said


class Says:
    """A finding of the severity given as a metric, at each step that has one."""

    name = "says"

    def __init__(self) -> None:
        self.seen = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        self.seen += 1
        order: Any = ("info", "warn", "act", "critical")
        return tuple(
            Finding(detector="says", step=signals.step, severity=order[int(which)], value=1.0, limit=0.0)
            for which in signals.metrics.values()
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = int(state["seen"])


class OnProbes(Says):
    only_probes = True
    needs = "metrics"


def shown(detector: Detector, steps: Mapping[int, str]) -> list[tuple[int, str]]:
    """What is said when the inner one says these severities, by their first letters."""
    number = {"i": 0.0, "w": 1.0, "a": 2.0, "c": 3.0}
    stream = [row(step, metrics={str(i): number[s] for i, s in enumerate(says)}) for step, says in steps.items()]
    return said(f for signals in stream for f in detector.update(signals))


class TestCooldown:
    def test_silent_for_so_many_steps_unless_action_is_asked_for(self) -> None:
        quiet = Cooldown(Says(), quiet_steps=4)
        heard = shown(quiet, {0: "i", 1: "w", 2: "ia", 5: "i", 6: "w", 9: "i", 10: "i"})
        assert heard == [(0, "info"), (2, "act"), (6, "warn"), (10, "info")]
        assert shown(Cooldown(Says(), quiet_steps=4), {0: "i", 1: "", 3: "i", 4: "i"}) == [(0, "info"), (4, "info")]

    def test_critical_is_always_heard(self) -> None:
        assert shown(Cooldown(Says(), quiet_steps=4), {0: "c", 1: "c", 2: "wc"}) == [
            (0, "critical"),
            (1, "critical"),
            (2, "critical"),
        ]

    def test_as_notes_only_warnings_wait_and_only_for_warnings(self) -> None:
        quiet = Cooldown(Says(), quiet_steps=4, as_notes=True)
        heard = shown(quiet, {0: "ia", 1: "ww", 4: "w", 5: "w", 8: "iaw"})
        expected = [(0, "info"), (0, "act"), (1, "warn"), (1, "info"), (4, "info"), (5, "warn")]
        assert heard == [*expected, (8, "info"), (8, "act"), (8, "info")]

    def test_the_inner_one_sees_every_step(self) -> None:
        inner = Says()
        shown(Cooldown(inner, quiet_steps=4), dict.fromkeys(range(7), "i"))
        assert inner.seen == 7

    def test_it_looks_like_what_it_wraps(self) -> None:
        plain, wrapped = Cooldown(Says(), quiet_steps=1), Cooldown(OnProbes(), quiet_steps=1)
        assert (plain.name, plain.only_probes, plain.needs) == ("says", False, "")
        assert (wrapped.only_probes, wrapped.needs) == (True, "metrics")
        assert sees_every_step(plain)
        assert not sees_every_step(wrapped)

    def test_its_state_is_the_waiting_and_the_inner_one(self) -> None:
        first, second = Cooldown(Says(), quiet_steps=4), Cooldown(Says(), quiet_steps=4)
        shown(first, {10: "w"})
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == {"until": 14, "inner": {"seen": 1}}
        assert shown(second, {13: "w", 14: "w"}) == [(14, "warn")]
        second.load_state_dict({"seen": 5})  # from a time without a cooldown
        assert second.state_dict() == {"until": -1, "inner": {"seen": 5}}


def test_which_signals_most_runs_never_have() -> None:
    flip = BitFlip(tensor="w", index=0, bit=0, repaired=True)
    wrong = Miscomputation(rank=0, host="h", tensors=("w",), count=1, bits=1, runs=3, persistent=False)
    given = {
        "metrics": {"a": 1.0},
        "batch_rms": 0.0,
        "buffer_peaks": (1.0,),
        "odd_replicas": ("w",),
        "bit_flips": (flip,),
        "miscomputations": (wrong,),
    }
    assert tuple(given) == KINDS
    assert occasional(row(0)) == (False,) * 6
    for position, (kind, value) in enumerate(given.items()):
        assert occasional(row(0, **{kind: value})) == tuple(i == position for i in range(6))


KINDS = ("metrics", "batch_rms", "buffer_peaks", "odd_replicas", "bit_flips", "miscomputations")


@pytest.mark.parametrize("position", range(6))
def test_who_is_asked(position: int) -> None:
    needy, other = Says(), Says()
    needy.needs, other.needs = KINDS[position], "loss"  # type: ignore[attr-defined]
    only = tuple(i == position for i in range(6))
    assert has_what_it_needs(needy, only)
    assert not has_what_it_needs(needy, tuple(not given for given in only))
    for detector in (other, Says()):
        assert has_what_it_needs(detector, (False,) * 6)


class TestRuns:
    def test_each_name_once_when_its_count_is_reached(self) -> None:
        runs = Runs(3)
        assert [runs.add({"a": True, "b": i > 0}) for i in range(6)] == [(), (), ("a",), ("b",), (), ()]

    def test_in_a_row(self) -> None:
        runs = Runs(2)
        assert runs.add({"a": True}) == ()
        assert runs.add({"a": False}) == ()
        assert runs.add({"a": True}) == ()
        assert runs.add({}) == ()  # not mentioned: the count stays
        assert runs.add({"a": True}) == ("a",)
        assert [runs.add({"a": good}) for good in (False, True, True, True)] == [()] * 4

    def test_its_state(self) -> None:
        runs, other = Runs(2), Runs(2)
        runs.add({"a": True, "b": True})
        runs.add({"a": True, "b": False, "c": True})
        other.load_state_dict(runs.state_dict())
        assert other.state_dict() == {"counts": {"a": 2, "c": 1}, "said": ["a"]}
        assert other.add({"a": True, "b": True, "c": True}) == ("c",)


def built(settings: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Detector]:
    return {detector.name: detector for detector in build_detectors(Config.load(settings or {}), **more)}


OPTIONAL = {
    "learning-rate-jump",
    "learning-rate-creep",
    "short-warmup",
    "lost-moments",
    "learning-rate-bounds",
    "clip-rate",
    "loss-scale",
}


class TestBuild:
    @pytest.mark.parametrize(
        ("settings", "more", "there"),
        [
            ({}, {}, {"learning-rate-jump", "learning-rate-creep"}),
            ({}, {"scheduled": True}, set()),
            ({}, {"scheduled": True, "beta2": 0.9}, {"short-warmup"}),
            ({}, {"scheduled": True, "decay": 0.9}, {"lost-moments"}),
            ({"monitoring": {"lr_min": 1e-6}}, {"scheduled": True}, {"learning-rate-bounds"}),
            ({"monitoring": {"lr_max": 1.0}}, {"scheduled": True}, {"learning-rate-bounds"}),
            ({"training": {"max_grad_norm": 1.0}}, {"scheduled": True}, {"clip-rate"}),
            ({"training": {"mixed_precision": "fp16"}}, {"scheduled": True}, {"loss-scale"}),
            ({"training": {"mixed_precision": "bf16"}}, {"scheduled": True}, set()),
        ],
    )
    def test_who_depends_on_settings(self, settings: dict[str, Any], more: dict[str, Any], there: set[str]) -> None:
        names = list(built(settings, **more))
        assert names[0] == "non-finite"
        assert OPTIONAL & set(names) == there

    def test_the_bounds_are_those_of_the_settings(self) -> None:
        bounds = built({"monitoring": {"lr_min": 0.1, "lr_max": 0.5}})["learning-rate-bounds"]
        assert [f.limit for f in bounds.update(row(0, lr=0.6))] == [0.5]
        assert bounds.update(row(1, lr=0.5)) == ()

    def test_own_ones_come_last_and_without_monitoring_only_the_gate_stays(self) -> None:
        own = Says()
        assert build_detectors(Config.load({}), extra=[own])[-1] is own
        bare = build_detectors(Config.load({"training": {"stability_monitoring": False}}), extra=[own])
        assert [detector.name for detector in bare] == ["non-finite", "says"]

    def test_warnings_that_come_and_go_are_rationed_to_one_in_400_steps(self) -> None:
        bounds = built()["metric-bounds"]
        heard = []
        for step in (0, 399, 400, 799, 800):
            heard += said(bounds.update(row(step, metrics={"a": float("nan")})))
            bounds.update(row(step, metrics={"a": 1.0}))
        assert heard == [(0, "warn"), (399, "info"), (400, "warn"), (799, "info"), (800, "warn")]

    def test_surprises_are_noted_once_in_500_steps(self) -> None:
        detector, heard = built()["rms-surprise"], []
        for step in range(40, 48):
            detector.update(row(step, probe=Probe(step=step, names=("a",), surprises=(1.0,))))
        for step in (100, 599, 600):
            heard += said(detector.update(row(step, probe=Probe(step=step, names=("a",), surprises=(99.0,)))))
        assert heard == [(100, "info"), (600, "info")]

    @pytest.mark.parametrize(
        ("training", "severity"),
        [
            ({}, "act"),
            ({"max_grad_norm": 5.0}, "info"),
            ({"max_grad_norm": 500.0}, "act"),
            ({"clip_rule": "zscore"}, "info"),
            ({"clip_rule": "zscore", "gradient_clipping": False}, "act"),
        ],
    )
    def test_a_spike_that_the_clipping_holds_is_a_note(self, training: dict[str, Any], severity: str) -> None:
        detector = built({"training": training})["gradient-spike"]
        for step in range(300):
            detector.update(row(step, grad_norm=1.0 + 0.1 * (step % 2)))
        assert said(detector.update(row(300, grad_norm=1e3, lr=0.1))) == [(300, severity)]


class Fake:
    def __init__(self, *betas: Any) -> None:
        self.param_groups = [{} if pair is None else {"betas": pair} for pair in betas]


def kind(name: str, module: str = "torch.optim.adam") -> type[Fake]:
    return type(name, (Fake,), {"__module__": module})


class Several:
    def __init__(self, *each: Any) -> None:
        self.each = each
        self.param_groups = [group for one in each for group in one.param_groups]


@pytest.mark.parametrize(
    ("betas", "beta2"),
    [
        ([(0.9, 0.99)], 0.99),
        ([[0.9, 0.99]], 0.99),
        ([None, (0.9, 0.99), (0.9, 0.5)], 0.99),
        ([None], None),
        ([(0.9,)], None),
        ([0.9], None),
        ([(0.9, 1)], None),
        ([(0.9, 0.0)], None),
        ([(0.9, 1.0)], None),
        ([(0.9, 0.99, 0.5)], 0.99),
    ],
)
def test_how_long_adam_remembers(betas: list[Any], beta2: float | None) -> None:
    assert beta2_of(Fake(*betas)) == beta2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "decay"),
    [
        (kind("Adam")((0.9, 0.99), (0.9, 0.9), None), 0.9),
        (kind("RAdam")((0.9, 0.99)), 0.99),
        (kind("Adam", "mine.adam")((0.9, 0.99)), None),
        (kind("Adamax")((0.9, 0.99)), None),
        (kind("Adam")((0.9, 1.0)), None),
        (kind("Adam")((0.9, 0.99), (0.9, 1)), None),
        (Several(kind("Adam")((0.9, 0.99)), kind("AdamW")((0.9, 0.5))), 0.5),
        (Several(kind("Adam")((0.9, 0.99)), kind("SGD")(None)), 0.99),
        (Several(kind("Adam")((0.9, 0.99)), kind("Lion", "mine")((0.9, 0.5))), None),
        (Several(kind("Adam")((0.9, 0.99)), kind("AdamW")(None)), None),
        (Several(kind("SGD")(None)), None),
    ],
)
def test_the_least_decay_of_optimizers_whose_rule_is_known(optimizer: Any, decay: float | None) -> None:
    assert decay_of(optimizer) == decay


def test_all_but_plain_descent_are_scale_free() -> None:
    assert is_scale_free(kind("Adam")(None))  # type: ignore[arg-type]
    for name in ("SGD", "ASGD", "LBFGS"):
        assert not is_scale_free(kind(name)(None))  # type: ignore[arg-type]
    assert not is_scale_free(Several(kind("Adam")(None), kind("SGD")(None)))  # type: ignore[arg-type]
