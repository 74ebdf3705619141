"""What batches, outputs and parameters have shown, kept over a run."""

import json
import math
from typing import Any

import pytest

from steadystep.diagnosis.measured import (
    Layers,
    LoopHabits,
    Measured,
    OutputTrail,
    is_bias,
    update_ratios,
)
from steadystep.records import BatchStats, Probe, Signals, Structure, WeightStats
from tests.unit.diagnosis.test_mechanisms import outputs, part


def trail(*losses: float, **more: Any) -> OutputTrail:
    """One probe for each loss, with the same outputs."""
    made = OutputTrail()
    for loss in losses:
        made.add(outputs(**more), loss)
    return made


def ratio(*pairs: tuple[float, float], terms: int = 1, kind: str = "mse") -> OutputTrail:
    """A loss at each probe beside the value of the first loss function."""
    made = OutputTrail()
    for loss, value in pairs:
        made.add(outputs(kind=kind, terms=terms, losses=((f"{kind} of ['target']", value),)), loss)
    return made


class TestLossFunction:
    def test_it_is_known_by_its_value(self) -> None:
        for loss, value, found in (
            (1000.0, 1002.0, {"mse of [1]": 1}),  # within two thousandths
            (1000.0, 1002.1, {}),
            (1000.0, 998.0, {"mse of [1]": 1}),
            (1000.0, -1002.0, {"negative mse of [1]": 1}),
            (-1000.0, -998.0, {"mse of [1]": 1}),
            (-1000.0, 998.0, {"negative mse of [1]": 1}),
            (0.0, 0.0, {"mse of [1]": 1, "negative mse of [1]": 1}),
        ):
            assert trail(loss, losses=(("mse of [1]", value),)).matches == found, (loss, value)

    def test_it_has_to_fit_four_of_five_probes_and_at_least_three(self) -> None:
        fits = {"losses": (("mse of x of [1]", 2.0),)}
        assert trail(2.0, 2.0, 2.0, **fits).loss == ("mse of x", "[1]")
        assert trail(2.0, 2.0, **fits).loss == ("", "")
        assert trail(*[2.0] * 8, 9.0, 9.0, **fits).loss == ("mse of x", "[1]")
        assert trail(*[2.0] * 7, 9.0, 9.0, 9.0, **fits).loss == ("", "")
        assert trail(9.0, 9.0, 9.0, **fits).loss == OutputTrail().loss == ("", "")

    def test_the_first_of_several_losses_of_a_step(self) -> None:
        made = OutputTrail()
        for value in (1.0, 2.0, 4.0):
            heard = outputs(kind="mse", terms=1, losses=(("mse of ['target']", value),), first=True)
            made.add(heard, 9.0, 2.0 * value, 7.0)
        assert made.pairs == [(2.0, 1.0), (4.0, 2.0), (8.0, 4.0)]
        assert (made.last.passes if made.last else 0, made.multiple) == (3, 2.0)
        assert (made.loss, made.scale) == (("", ""), 1.0)  # what the others measure is not known

    def test_the_last_of_several_losses_of_a_step(self) -> None:
        made = OutputTrail()
        made.add(outputs(kind="mse", terms=1, losses=(("mse of ['target']", 9.0),)), 9.0, 2.0, 7.0)
        assert made.pairs == [(9.0, 9.0)]

    def test_the_one_that_fits_best(self) -> None:
        made = trail(2.0, 2.0, 2.0, losses=(("l1 of [1]", 2.0),))
        made.matches["mse of [1]"] = 4
        assert made.loss == ("mse", "[1]")

    def test_a_multiple_of_its_only_term(self) -> None:
        for made, scale in (
            (ratio((2.0, 1.0), (4.0, 2.0), (6.0, 3.0)), 2.0),
            (ratio((2.0, 1.0), (4.0, 2.0)), 1.0),
            (ratio((2.0, 1.0), (4.0, 2.0), (6.0, 0.0)), 1.0),
            (ratio((-2.0, 1.0), (-4.0, 2.0), (-6.0, 3.0)), 1.0),
            (ratio((2.0, 1.0), (4.0, 2.0), (2.00019, 1.0)), 2.0),  # within a ten thousandth
            (ratio((2.0, 1.0), (4.0, 2.0), (2.00021, 1.0)), 1.0),
            (ratio((2.0, 1.0), (4.0, 2.0), (1.99979, 1.0)), 1.0),
            (ratio((2.0, 1.0), (4.0, 2.0), (6.0, 3.0), terms=2), 1.0),
            (ratio((2.0, 1.0), (4.0, 2.0), (6.0, 3.0), kind=""), 1.0),
        ):
            assert made.scale == scale
            assert made.loss == (("mse", "['target']") if scale != 1.0 else ("", ""))

    def test_another_loss_that_fits_is_plain(self) -> None:
        made = ratio((2.0, 1.0), (4.0, 2.0), (6.0, 3.0))
        made.matches = {"mse of [1]": 3}
        assert (made.loss, made.scale) == (("mse", "[1]"), 1.0)

    def test_the_last_eight_values_are_kept(self) -> None:
        made = ratio(*((float(n), 1.0) for n in range(10)))
        assert made.pairs == [(float(n), 1.0) for n in range(2, 10)]
        assert trail(1.0, kind="mse", losses=(("mse of [1]", 1.0),)).pairs == []


class TestOutputs:
    def test_the_first_the_last_and_the_range_of_all(self) -> None:
        made = OutputTrail()
        for step, low, high in ((1, -1.0, 2.0), (2, -3.0, 1.0), (3, 0.0, 0.5)):
            made.add(outputs(step=step, smallest=low, largest=high, evaluating=step > 1), 1.0)
        assert made.first is not None
        assert made.last is not None
        assert (made.count, made.first.step, made.last.step) == (3, 1, 3)
        assert (made.lowest, made.highest, made.evaluating) == (-3.0, 2.0, 2)

    @pytest.mark.parametrize(
        ("fields", "rows", "columns"),
        [
            ({"row_error": 1e-3}, 1, 0),
            ({"row_error": 1.1e-3}, 0, 0),
            ({"column_error": 1e-3}, 0, 1),
            ({"column_error": 1.1e-3}, 0, 0),
            ({"row_error": 0.0, "column_error": 0.0, "smallest": -0.1}, 0, 0),
            ({"row_error": 0.0, "column_error": 0.0, "shape": (32,)}, 0, 0),
        ],
    )
    def test_rows_or_columns_that_are_probabilities(self, fields: dict[str, Any], rows: int, columns: int) -> None:
        assert trail(1.0, **{"smallest": 0.0} | fields).simplex == [rows, columns]

    def test_a_mistake_counts_where_nearly_every_probe_shows_it(self) -> None:
        twice = outputs(mistakes=(("wrong-loss", "of scores"), ("wrong-loss", "once more")))
        made = OutputTrail()
        assert made.mistake("wrong-loss") == ""
        for count in range(1, 6):
            made.add(outputs() if count == 1 else twice, 1.0)
            assert bool(made.mistake("wrong-loss")) is (count == 5), count
        assert made.wrong == {"wrong-loss": 4}
        assert made.mistake("wrong-loss") == "of scores"
        assert made.mistake("softmax-axis") == ""

    def test_saved_and_loaded_it_is_the_same(self) -> None:
        made = ratio((2.0, 1.0), (math.inf, 2.0), (6.0, 3.0))
        made.add(outputs(mistakes=(("wrong-loss", "x"),), evaluating=True, row_error=0.0, smallest=0.0), 1.0)
        state = json.loads(json.dumps(made.state_dict(), allow_nan=False))
        again = OutputTrail()
        again.load_state_dict(state)
        assert again.pairs == [(2.0, 1.0), (6.0, 3.0)]
        assert again.state_dict() == made.state_dict()
        for name in ("count", "first", "last", "simplex", "evaluating", "wrong", "lowest", "highest"):
            assert repr(getattr(again, name)) == repr(getattr(made, name)), name

    def test_a_range_that_is_infinite_or_unknown_is_not_saved(self) -> None:
        for made in (OutputTrail(), trail(1.0, largest=math.inf)):
            assert made.state_dict()["range"] is None
            again = OutputTrail()
            again.load_state_dict(made.state_dict())
            assert (again.lowest, again.highest) == (math.inf, -math.inf)
        old = {k: v for k, v in trail(1.0).state_dict().items() if k not in ("pairs", "wrong")}
        again.load_state_dict(old)
        assert (again.pairs, again.wrong) == ([], {})


class TestLoop:
    def test_habits_and_their_limits(self) -> None:
        for habit, yes, no in (
            ("never_clears", {"carried": 5}, {"carried": 4}),
            ("never_clears", {"carried": 9, "renewed": 8}, {"carried": 9, "renewed": 9}),
            ("clears_often", {"carried": 7, "renewed": 1}, {"carried": 8, "renewed": 1}),
            ("forgets", {"emptied": 3}, {"emptied": 2}),
            ("forgets", {"emptied": 11, "renewed": 60, "carried": 40}, {"emptied": 10, "renewed": 60, "carried": 40}),
        ):
            assert getattr(LoopHabits(**yes), habit), habit
            assert not getattr(LoopHabits(**no), habit), habit


def signals(step: int = 1, **more: Any) -> Signals:
    return Signals(**{"step": step, "loss": 1.0, "grad_norm": 1.0} | more)


class TestMeasured:
    def test_the_first_batches_and_the_newest(self) -> None:
        made = Measured()
        batches = [BatchStats(batches=n, parts=()) for n in (1, 2, 3)]
        for batch in batches:
            made.add(signals(batch=batch), stepped=True)
            made.add(signals(), stepped=True)
        assert (made.early, made.batch) == (batches[0], batches[2])

    def test_outputs_go_with_the_loss_of_the_last_micro_batch(self) -> None:
        made, seen = Measured(), outputs(losses=(("mse of [1]", 3.0),))
        made.add(signals(outputs=seen), stepped=True)
        assert made.outputs.count == 0
        made.add(signals(outputs=seen, losses=(1.0, 3.0)), stepped=True)
        assert (made.outputs.count, made.outputs.matches) == (1, {"mse of [1]": 1})

    @pytest.mark.parametrize(
        ("name", "rewarded"), [("eval/reward", True), ("mean_return", True), ("accuracy", False), ("", False)]
    )
    def test_a_metric_may_be_a_reward(self, name: str, rewarded: bool) -> None:
        made = Measured()
        made.add(signals(metrics={name: 1.0, "lr": 1.0} if name else {}), stepped=True)
        assert made.rewarded is rewarded
        made.add(signals(metrics={"accuracy": 1.0}), stepped=True)
        assert made.rewarded is rewarded

    def test_what_an_update_has_changed(self) -> None:
        made = Measured()
        probe = Probe(step=1, names=("a", "b", "c"), weight_rms=(1.0,) * 3, update_rms=(0.0, 1e-9, 1.0))
        made.add(signals(probe=probe, initial=WeightStats(names=("a",), rms=(1.0,))), stepped=False)
        assert made.updated == {"b", "c"}
        assert made.initial == WeightStats(names=("a",), rms=(1.0,))

    def test_parameters_with_a_gradient_are_looked_for_often_at_first(self) -> None:
        made = Measured()
        for look in range(1, 100):
            made.add(signals(names=(f"p{look}",)), stepped=True)
        assert made.touched == {f"p{look}" for look in (*range(1, 65), 80, 96)}
        assert made.untouched(Structure(trained=("p1", "p65", "p80"))) == ("p65",)

    def test_the_same_names_are_looked_at_once_and_refused_steps_never(self) -> None:
        made, names = Measured(), ("a",)
        made.add(signals(names=("b",)), stepped=False)
        for _ in range(200):
            made.add(signals(names=names), stepped=True)
        made.add(signals(names=("c",)), stepped=True)
        assert made.touched == {"a", "c"}

    def test_networks_in_turns(self) -> None:
        made = Measured()
        for names in (("a", "b"), ("c",), ("a", "b"), ("b", "c")):
            made.add(signals(names=names), stepped=True)
        assert made.loop.turns == 2

    def test_saved_and_loaded_it_is_the_same(self) -> None:
        made = Measured()
        assert made.state_dict()["batch"] is None
        again = Measured()
        again.load_state_dict(json.loads(json.dumps(made.state_dict())))
        assert again.state_dict() == made.state_dict()
        seen = {"batch": BatchStats(batches=2, parts=(part(),)), "initial": WeightStats(names=("a",), rms=(1.0,))}
        probe = Probe(step=1, names=("b",), weight_rms=(1.0,), update_rms=(1.0,))
        made.add(signals(names=("b", "a"), probe=probe, metrics={"reward": 1.0}, **seen), stepped=True)
        made.loop.carried, made.loop.renewed, made.loop.emptied, made.loop.turns = 1, 2, 3, 4
        again.load_state_dict(json.loads(json.dumps(made.state_dict())))
        assert again.state_dict() == made.state_dict()
        assert repr((again.batch, again.early, again.initial)) == repr((made.batch, made.early, made.initial))
        assert (again.touched, again.updated, again.rewarded, again.loop) == ({"a", "b"}, {"b"}, True, made.loop)

    def test_a_state_of_before_the_loop_was_watched(self) -> None:
        again = Measured()
        again.load_state_dict({k: v for k, v in again.state_dict().items() if k != "loop"})
        assert again.loop == LoopHabits()
        again.load_state_dict(again.state_dict() | {"loop": [3, 4]})
        assert again.loop == LoopHabits(carried=3, renewed=4)


def probe(step: int, *moves: float, weight: float = 1.0) -> Probe:
    names = tuple(f"{n}.weight" for n in range(len(moves)))
    return Probe(step=step, names=names, weight_rms=(weight,) * len(moves), update_rms=moves)


class TestLayers:
    def test_the_median_and_the_highest_of_each_probe(self) -> None:
        made = Layers()
        for moves in ((0.1, 0.2, 0.9), (0.3, 0.5, 0.4), ()):
            made.add(probe(7, *moves))
        assert (made.ratios, made.highest) == ([0.2, 0.4], 0.9)

    def test_every_second_one_is_dropped_at_128(self) -> None:
        made = Layers()
        for step in range(132):
            made.add(probe(step, float(step + 1)))
        assert made.ratios == [float(step) for step in range(1, 128, 2)] + [129.0, 131.0]
        assert made.first is not None
        assert made.last is not None
        assert (made.first.step, made.last.step) == (0, 131)

    def test_resume_is_invisible(self) -> None:
        made, again = Layers(), Layers()
        again.load_state_dict(json.loads(json.dumps(made.state_dict())))
        assert (again.first, again.last) == (None, None)
        for step in range(130):
            made.add(probe(step, float(step + 1)))
        again.load_state_dict(json.loads(json.dumps(made.state_dict())))
        for step in range(130, 140):
            made.add(probe(step, float(step + 1)))
            again.add(probe(step, float(step + 1)))
        assert again.state_dict() == made.state_dict()
        assert (again.first, again.last, again.ratios) == (made.first, made.last, made.ratios)

    def test_ratios_are_of_weights_and_of_biases_where_there_is_nothing_else(self) -> None:
        columns = {"weight_rms": (2.0, 0.0, 1.0, 1.0), "update_rms": (1.0, 1.0, math.inf, 3.0)}
        assert update_ratios(Probe(step=1, names=("a", "b", "c", "d.bias"), **columns)) == [0.5]
        assert update_ratios(Probe(step=1, names=("a.bias", "b", "c", "d.bias"), **columns)) == [0.5, 3.0]
        assert update_ratios(Probe(step=1)) == []


def test_a_bias_is_known_by_the_last_part_of_its_name() -> None:
    assert [is_bias(name) for name in ("0.bias", "lstm.bias_ih_l0", "bias", "bias.weight")] == [True, True, True, False]
