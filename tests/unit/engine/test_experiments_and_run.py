"""What experiments may claim about a run, and one story of both."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from steadystep.diagnosis.causes import CONSEQUENCES, EXPLAINED
from steadystep.diagnosis.conclusion import NOT_JUDGED
from steadystep.diagnosis.graph_evidence import CUT_OFF
from steadystep.engine import experiments
from steadystep.engine.experiments import credible, examine_guarded, one_story, told_together
from steadystep.examination.comparison import COMPARED
from steadystep.examination.experiments import HAS_LEARNED
from steadystep.records import Diagnosis


def of(name: str, **more: str) -> Diagnosis:
    """From "cause" or "cause:fault"."""
    cause, _, fault = name.partition(":")
    return Diagnosis(cause=cause, fault=fault, **more)


def names(found: Any) -> list[str]:
    return [f"{each.cause}:{each.fault}" if each.fault else each.cause for each in found]


def story(seen: list[Diagnosis], tried: list[Diagnosis], *proven: tuple[str, str]) -> list[str]:
    return names(one_story(seen, tried, set(proven)))


class TestOneStory:
    def test_of_several_trials_all_must_be_healthy_to_refute_a_run(self) -> None:
        found = story([of("no-learning")], [of("learning-rate-too-low"), of("healthy")])
        assert found == ["learning-rate-too-low", "healthy", "no-learning"]

    def test_a_repair_that_works_says_more_than_an_effect(self) -> None:
        seen = of("no-learning:output-independent-of-input")
        proven = ("no-learning", "output-independent-of-input")
        plain, repaired = of("unscaled-data"), of("unscaled-data", advice="scale the inputs (tried: it learns)")
        assert story([seen], [plain], proven)[0] == "no-learning:output-independent-of-input"
        assert story([seen], [repaired], proven)[0] == "unscaled-data"
        other = of("missing-zero-grad")
        assert story([other], [repaired])[0] == "missing-zero-grad"

    @pytest.mark.parametrize("cause", ["non-finite-loss", "non-finite-gradient"])
    def test_only_what_breaks_explains_a_loss_that_is_no_number(self, cause: str) -> None:
        assert story([of(cause)], [of("no-learning:wrong-loss")])[0] == cause
        assert story([of(cause)], [of("exploding-gradient")])[0] == "exploding-gradient"
        assert story([of("oscillation"), of(cause)], [of("no-learning:wrong-loss")])[0] == "no-learning:wrong-loss"

    @pytest.mark.parametrize("seen", ["zero-gradient", "zero-gradient:frozen-parameters"])
    def test_why_there_is_no_gradient_comes_before_that_there_is_none(self, seen: str) -> None:
        cause, _, fault = seen.partition(":")
        wrong = of("no-learning:wrong-loss")
        assert story([of(seen)], [wrong], (cause, fault)) == ["no-learning:wrong-loss", seen]
        cut = of(seen, evidence=f"the weights are {CUT_OFF}")
        assert story([cut], [wrong], (cause, fault)) == [seen, "no-learning:wrong-loss"]
        assert story([of(seen)], [of("no-learning:labels-shuffled")], (cause, fault))[0] == seen
        assert story([of(seen), cut], [wrong], (cause, fault))[0] == "no-learning:wrong-loss"

    def test_without_a_word_of_what_explains_it_what_was_seen_comes_first(self) -> None:
        assert story([of("oscillation")], [of("no-learning")]) == ["oscillation", "no-learning"]
        assert story([of("oscillation")], [of("no-learning:wrong-loss")])[0] == "no-learning:wrong-loss"
        both = [of("no-learning"), of("clipping-too-tight")]
        assert story([of("oscillation")], both) == ["no-learning", "clipping-too-tight", "oscillation"]

    def test_a_comparison_comes_after_what_was_seen_but_for_a_weak_conclusion(self) -> None:
        compared = of("learning-rate-too-low", evidence=f"{COMPARED}: 0.5 and 0.1")
        assert story([of("oscillation")], [compared]) == ["oscillation", "learning-rate-too-low"]
        weak = of("no-learning:labels-shuffled")
        assert story([weak], [compared]) == ["learning-rate-too-low", "no-learning:labels-shuffled"]

    def test_a_cause_comes_before_what_follows_from_it(self) -> None:
        effects = sorted(EXPLAINED["saturation"])
        assert "no-learning" in effects
        for effect in effects:
            found = of(effect) if effect in {each.value for each in experiments.Cause} else of(f"no-learning:{effect}")
            told = story([of("saturation"), of("oscillation")], [found])
            assert told[0] == "saturation", effect
            told = story([of("oscillation"), of("saturation")], [found])
            assert told[0] != "saturation", effect  # only the likeliest of a run is believed so far

    def test_by_its_fault_where_it_has_one(self) -> None:
        seen = of("no-learning:constant-inputs")
        assert "unscaled-data" in EXPLAINED["constant-inputs"]
        assert story([seen], [of("unscaled-data")]) == ["no-learning:constant-inputs", "unscaled-data"]
        assert story([of("oscillation")], [of("unscaled-data")]) == ["unscaled-data", "oscillation"]

    def test_what_explodes_breaks(self) -> None:
        for effect in sorted(CONSEQUENCES["exploding-gradient"]):
            assert story([of("exploding-gradient")], [of(effect)]) == ["exploding-gradient", effect]
        assert story([of("exploding-gradient")], [of("oscillation")]) == ["oscillation", "exploding-gradient"]

    def test_an_input_that_is_not_noticed_is_why_nothing_reads_it(self) -> None:
        fault = "output-independent-of-input"
        assert fault in EXPLAINED["zero-gradient"]
        assert story([of("zero-gradient")], [of(f"no-learning:{fault}")])[0] == f"no-learning:{fault}"
        assert story([of("dead-units")], [of(f"no-learning:{fault}")])[0] == "dead-units"
        assert story([of("zero-gradient")], [of("no-learning:wrong-loss")])[0] == "no-learning:wrong-loss"

    def test_shuffled_labels_stay_behind_the_likeliest_of_a_run(self) -> None:
        weak = of("no-learning:labels-shuffled")
        seen = [of("oscillation"), of("unscaled-data")]
        assert story(seen, [weak]) == ["oscillation", "no-learning:labels-shuffled", "unscaled-data"]
        assert story([weak], [weak]) == ["no-learning:labels-shuffled"]
        other = of("zero-gradient:labels-shuffled")  # of the same kind: no better
        assert story([other], [weak]) == ["no-learning:labels-shuffled", "zero-gradient:labels-shuffled"]

    def test_nothing_was_seen(self) -> None:
        assert story([], [of("oscillation")]) == ["oscillation"]
        assert story([of("healthy")], [of("oscillation")]) == ["oscillation"]


class TestCredible:
    HEALTHY = Diagnosis()
    UNJUDGED = Diagnosis(evidence=f"{NOT_JUDGED}: why")

    def kept(self, seen: Diagnosis, *tried: Diagnosis, **facts: Any) -> list[str]:
        return names(credible(seen, list(tried), **{"learned": False, **facts}))

    def test_where_the_level_says_nothing_only_the_program_speaks(self) -> None:
        tried = of("learning-rate-too-low"), of("no-learning:wrong-loss")
        for seen in (of("oscillation"), self.HEALTHY):
            assert self.kept(seen, *tried, judged=False) == ["no-learning:wrong-loss"]
            assert self.kept(seen, tried[0], judged=False) == [seen.cause]
            assert self.kept(seen, *tried) == names(tried)
        assert self.kept(self.HEALTHY, *tried, judged=False, known=True) == ["no-learning:wrong-loss"]

    def test_what_was_not_judged_is_judged_by_a_known_loss(self) -> None:
        tried = of("learning-rate-too-low"), of("no-learning:wrong-loss")
        assert self.kept(self.UNJUDGED, *tried) == ["no-learning:wrong-loss"]
        assert self.kept(self.UNJUDGED, *tried, known=True) == names(tried)

    def test_a_short_trial_does_not_refute_a_fall(self) -> None:
        vague, named = of("no-learning"), of("no-learning:wrong-loss")
        assert self.kept(self.HEALTHY, vague, named) == ["no-learning:wrong-loss"]
        assert self.kept(self.HEALTHY, vague) == ["healthy"]
        assert self.kept(self.UNJUDGED, vague, known=True) == ["no-learning"]

    def test_where_it_learned_only_a_comparison_tells_of_a_low_rate(self) -> None:
        slow, compared = of("learning-rate-too-low"), of("learning-rate-too-low", evidence=COMPARED)
        assert self.kept(self.HEALTHY, slow, learned=True) == ["healthy"]
        assert self.kept(self.HEALTHY, compared, learned=True) == ["learning-rate-too-low"]
        assert self.kept(self.HEALTHY, of("oscillation"), learned=True) == ["oscillation"]
        assert self.kept(self.HEALTHY, slow) == ["learning-rate-too-low"]


@dataclass(frozen=True)
class Done:
    causes: tuple[Diagnosis, ...]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is known about the run."""
    said: dict[str, Any] = {"proven": set(), "judged": True, "learned": False, "hardly": False, "supervised": False}
    monkeypatch.setattr(experiments, "proven", lambda facts: set(said["proven"]))
    monkeypatch.setattr(experiments, "is_judged", lambda facts: said["judged"])
    monkeypatch.setattr(experiments, "has_learned", lambda facts: said["learned"])
    monkeypatch.setattr(experiments, "hardly_learned", lambda facts: said["hardly"])
    monkeypatch.setattr(experiments, "supervised", lambda facts: said["supervised"])
    return said


def facts(*, lrs: Any = (), announced: float = 1.0, turns: bool = False, norms: Any = ()) -> Any:
    return SimpleNamespace(
        trace=SimpleNamespace(lrs=list(lrs), first_norms=list(norms)),
        structure=SimpleNamespace(announced=announced),
        measured=SimpleNamespace(loop=SimpleNamespace(turns=turns)),
    )


def told(run: Any, seen: list[Diagnosis], *tried: Diagnosis) -> list[str]:
    return names(told_together(run, tuple(seen), Done(tried)))  # type: ignore[arg-type]


SLOW, WELL, ZERO = of("learning-rate-too-low"), Diagnosis(), of("zero-gradient")


class TestToldTogether:
    @pytest.mark.parametrize(
        ("lrs", "refuted"),
        [
            ((), True),
            ((0.09, 0.09, 0.09), False),
            ((0.1, 0.1, 0.1), True),
            ((0.5, 0.01, 0.02), False),  # the one in the middle, in order of size
            ((0.5, 0.5, 0.02), True),
        ],
    )
    def test_a_low_rate_is_seen_as_it_is_where_the_schedule_announced_ten_times_more(
        self, known: dict[str, Any], lrs: Any, refuted: bool
    ) -> None:
        assert told(facts(lrs=lrs), [SLOW], WELL) == ["healthy" if refuted else "learning-rate-too-low"]
        assert told(facts(lrs=[rate * 3 for rate in lrs], announced=3.0), [SLOW], WELL) == (
            ["healthy"] if refuted else ["learning-rate-too-low"]
        )

    def test_trials_that_got_no_further_refute_nothing(self, known: dict[str, Any]) -> None:
        seen = [of("oscillation")]
        assert told(facts(), seen, WELL) == ["healthy"]
        assert told(facts(), seen, Diagnosis(evidence=f"{HAS_LEARNED}: from 3 to 1")) == ["oscillation"]
        assert told(facts(turns=True), seen, WELL) == ["oscillation"]
        known["judged"] = False
        assert told(facts(), seen, WELL) == ["oscillation"]
        known["judged"], known["proven"] = True, {("oscillation", "")}
        assert told(facts(), seen, WELL) == ["oscillation"]

    def test_a_gradient_that_has_gone_is_no_fault_of_a_healthy_run(self, known: dict[str, Any]) -> None:
        assert told(facts(norms=[0.0, 1.0]), [WELL], ZERO) == ["healthy"]
        assert told(facts(norms=[0.0, 0.0]), [WELL], ZERO) == ["zero-gradient"]
        assert told(facts(norms=[1.0]), [of("oscillation")], ZERO) == ["zero-gradient", "oscillation"]
        named = of("zero-gradient:frozen-parameters")
        assert told(facts(norms=[1.0]), [WELL], ZERO, named) == ["zero-gradient:frozen-parameters"]

    def test_a_run_that_learns_is_believed_unless_it_hardly_does(self, known: dict[str, Any]) -> None:
        assert told(facts(), [WELL], SLOW) == ["learning-rate-too-low"]
        known["learned"] = True
        assert told(facts(), [WELL], SLOW) == ["healthy"]
        known["hardly"] = True
        assert told(facts(), [WELL], SLOW) == ["learning-rate-too-low"]

    def test_the_level_of_a_known_loss_is_judged(self, known: dict[str, Any]) -> None:
        unjudged = [TestCredible.UNJUDGED]
        assert told(facts(), unjudged, SLOW) == ["healthy"]
        known["supervised"] = True
        assert told(facts(), unjudged, SLOW) == ["learning-rate-too-low"]
        known["judged"] = False
        assert told(facts(), unjudged, SLOW) == ["healthy"]


class TestWhatIsHandedOver:
    @pytest.fixture
    def handed(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What the examination was given."""
        said: dict[str, Any] = {}

        def examine(model: Any, optimizer: Any, loss: Any, batches: Any, **options: Any) -> Done:
            said.update(loss=loss, batches=batches, **options)
            return Done((WELL,))

        monkeypatch.setattr(experiments, "examine", examine)
        monkeypatch.setattr(experiments, "told_together", lambda facts, seen, done: seen)
        monkeypatch.setattr(experiments, "rank", lambda facts: (SLOW,))
        monkeypatch.setattr(experiments, "with_candidates", lambda story, facts: story)
        return said

    def run(self, rates: list[float], *, casts: bool = False, **options: Any) -> tuple[Any, Any]:
        class Autocast:
            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                pass

        asked: list[int] = []

        def remembered(most: int) -> tuple[Any, ...]:
            asked.append(most)
            return ()

        trace = SimpleNamespace(num_updates=17, lrs=rates)
        parts: Any = SimpleNamespace(
            ranks=SimpleNamespace(size=1),
            recovery=SimpleNamespace(remembered=remembered),
            precision=SimpleNamespace(autocast=Autocast, casts=casts),
            run_history=SimpleNamespace(facts=lambda: SimpleNamespace(trace=trace), diagnose=lambda: (SLOW,)),
            progress=SimpleNamespace(attempts=5, examined=None),
        )
        model = nn.Linear(1, 1)
        config: Any = SimpleNamespace(training=SimpleNamespace(max_grad_norm=2.5))
        done = examine_guarded(parts, model, SGD(model.parameters(), lr=0.1), config, [1], loss_of, options)
        assert asked == [64]
        return parts, done

    def test_the_clipping_the_updates_and_the_story(self, handed: dict[str, Any]) -> None:
        parts, done = self.run([0.1, 0.1])
        assert (handed["max_grad_norm"], handed["num_updates"]) == (2.5, 17)
        assert done.causes == (SLOW,)
        assert parts.progress.examined == (5, (SLOW,))
        assert handed["loss"](3) == 6
        self.run([0.1], num_updates=3)
        assert handed["num_updates"] == 3

    @pytest.mark.parametrize(("rates", "largest"), [([], None), ([0.1, 0.2], None), ([0.2], None), ([0.3, 0.2], 0.3)])
    def test_a_rate_that_has_fallen_is_told_with_its_largest(
        self, handed: dict[str, Any], rates: list[float], largest: float | None
    ) -> None:
        self.run(rates)
        assert handed.get("largest_rate") == largest

    @pytest.mark.parametrize("casts", [False, True])
    def test_under_another_precision_the_plain_loss_is_known_too(self, handed: dict[str, Any], casts: bool) -> None:
        self.run([0.1], casts=casts)
        assert getattr(handed["loss"], "plain", None) is (loss_of if casts else None)


def loss_of(batch: Any) -> Any:
    return 2 * batch
