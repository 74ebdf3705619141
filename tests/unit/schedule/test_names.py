"""Schedules by name: the ones people know, with errors they can act on."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep import ConfigError, schedule
from steadystep.schedule import named
from tests.reference import schedules as twin

OPTIONS = {"step": {"step_size": 7, "gamma": 0.5}, "exponential": {"gamma": 0.97}, "wsd": {"decay_steps": 0.2}}


@st.composite
def runs(draw: st.DrawFn) -> dict[str, float]:
    total = draw(st.integers(2, 150))
    warmup = draw(st.integers(0, total - 1))
    floor, start = draw(st.floats(0.0, 1.0)), draw(st.floats(0.0, 1.0))
    return {"total_steps": total, "warmup_steps": warmup, "floor": floor, "warmup_start": start}


@given(runs(), st.integers(0, 200), st.integers(1, 9), st.floats(0.2, 5.0))
def test_names_are_their_twins(run: dict, step: int, cycles: int, power: float) -> None:
    total, rise, floor = run["total_steps"], run["warmup_steps"], run["floor"]
    fall, cycles = total - rise, min(cycles, total - rise)
    expected = {
        "linear": (lambda s: twin.linear(s, fall, floor), {}),
        "cosine": (lambda s: twin.cosine(s, fall, floor), {}),
        "cosine_with_restarts": (lambda s: twin.equal_cycles(s, fall, cycles, floor), {"num_cycles": cycles}),
        "constant": (lambda s: 1.0, {}),
        "constant_with_warmup": (lambda s: 1.0, {}),
        "polynomial": (lambda s: twin.polynomial(s, fall, power, floor), {"power": power}),
        "inverse_sqrt": (lambda s: twin.inverse_sqrt(s, rise or 10_000, floor), {}),
        "step": (lambda s: twin.step_decay(s, 7, 0.5, floor), OPTIONS["step"]),
        "exponential": (lambda s: twin.exponential(s, 0.97, floor), OPTIONS["exponential"]),
    }
    for name, (curve, options) in expected.items():
        want = twin.after_warmup(step, rise, run["warmup_start"], curve)
        assert named(name, **run, **options)(step) == pytest.approx(want, rel=1e-12, abs=1e-12), name


@pytest.mark.parametrize("name", schedule.NAMES)
@given(run=runs(), step=st.integers(-5, 10**7))
def test_every_name_stays_between_its_floor_and_one_after_the_warmup(name: str, run: dict, step: int) -> None:
    if name == "wsd":
        run["warmup_steps"] = min(run["warmup_steps"], math.floor(0.8 * run["total_steps"]) - 1)
        if run["warmup_steps"] < 0:
            return
    made = named(name, **run, **OPTIONS.get(name, {}))
    low = run["floor"] if step >= run["warmup_steps"] else min(run["warmup_start"], 1.0)
    assert low <= made(step) <= 1.0
    assert made(step) == made(step)
    assert made(run["warmup_steps"]) == 1.0


@given(st.integers(2, 120), st.data())
def test_wsd_keeps_its_three_parts_inside_the_run(total: int, data: st.DataObject) -> None:
    rise = data.draw(st.integers(0, total - 1))
    fall = data.draw(st.integers(1, total - rise))
    kind = data.draw(st.sampled_from(["cosine", "linear", "1-sqrt"]))
    made = named("wsd", total_steps=total, warmup_steps=rise, decay_steps=fall, decay_type=kind, floor=0.1)
    curve = {"cosine": twin.cosine, "linear": twin.linear, "1-sqrt": twin.one_minus_sqrt}[kind]
    assert made(rise) == made(total - fall) == 1.0
    assert made(total) == 0.1
    for step in range(total - fall, total):
        assert made(step) == pytest.approx(curve(step - total + fall, fall, 0.1), rel=1e-12)


@pytest.mark.parametrize(
    ("fraction", "total", "count"),
    [(0.1, 1000, 100), (0.07, 100, 7), (0.05, 30, 2), (0.1, 33, 4), (1e-9, 100, 1), (0.0, 100, 0), (0.29, 100, 29)],
)
def test_a_fraction_of_the_run_is_rounded_up(fraction: float, total: int, count: int) -> None:
    by_fraction = named("linear", total_steps=total, warmup_steps=fraction)
    by_count = named("linear", total_steps=total, warmup_steps=count)
    assert [by_fraction(s) for s in range(total + 2)] == [by_count(s) for s in range(total + 2)]


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("Cosine", "cosine"),
        ("cosine-with-restarts", "cosine_with_restarts"),
        ("cosine_with_min_lr", "cosine"),
        ("warmup_stable_decay", "wsd"),
        ("cosine_annealing", "cosine"),
    ],
)
def test_other_spellings(name: str, same: str) -> None:
    ours, theirs = (named(n, total_steps=50, warmup_steps=5, floor=0.1) for n in (name, same))
    assert [ours(s) for s in range(60)] == [theirs(s) for s in range(60)]


def test_plateau_by_name_is_a_plateau_with_its_warmup() -> None:
    made = named("plateau", warmup_steps=4, floor=0.2, patience=0, factor=0.5)
    assert isinstance(made, schedule.Plateau)
    assert [made(s) for s in (0, 1, 4, 99)] == [0.0, 0.25, 1.0, 1.0]
    for _ in range(9):
        made.update(1.0)
    assert [made(s) for s in (1, 99)] == [0.05, 0.2]
    assert isinstance(named("reduce_lr_on_plateau"), schedule.Plateau)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: named("cosin", total_steps=9), "schedule 'cosin' is unknown: did you mean 'cosine'?"),
        (lambda: named("StepLR"), "did you mean 'step_lr'?"),
        (lambda: named("xyzzy"), "use one of constant, constant_with_warmup, linear"),
        (lambda: named("linear"), "schedule 'linear' needs total_steps"),
        (lambda: named("linear", total_steps=100, warmup_steps=100), "the run would end before its warmup"),
        (lambda: named("constant", total_steps=100, warmup_steps=200), "5 to 10 %"),
        (lambda: named("linear", total_steps=0), "total_steps = 0"),
        (lambda: named("linear", total_steps=-5), "total_steps = -5"),
        (lambda: named("linear", total_steps=100, warmup_steps=-1), "warmup_steps = -1"),
        (lambda: named("linear", total_steps=100, warmup_steps=-0.1), "a fraction between 0 and 1"),
        (lambda: named("linear", total_steps=100, warmup_steps=1.0), "warmup_steps = 1.0: must be an integer count"),
        (lambda: named("linear", total_steps=100, warmup_steps=math.nan), "warmup_steps = nan"),
        (lambda: named("linear", total_steps=100, warmup_steps=math.inf), "warmup_steps = inf"),
        (lambda: named("linear", total_steps=100, warmup_steps=True), "warmup_steps = True"),
        (lambda: named("linear", total_steps=math.inf), "total_steps = inf"),
        (lambda: named("linear", total_steps=100, floor=1e-5 - 1), "floor"),
        (lambda: named("linear", total_steps=100, warmup_start=2.0), "warmup_start = 2.0"),
        (lambda: named("constant", warmup_steps=0.1), "and needs total_steps"),
        (lambda: named("step"), "schedule 'step' needs step_size"),
        (lambda: named("exponential"), "schedule 'exponential' needs gamma"),
        (lambda: named("cosine", total_steps=9, gamma=0.1), "schedule 'cosine' has no option 'gamma': it takes none"),
        (lambda: named("step", step_size=3, gama=0.1), "it takes step_size, gamma"),
        (lambda: named("plateau", patiense=3), "'plateau' has no option 'patiense': it takes mode, factor, patience"),
        (lambda: named("inverse_sqrt", timescale=0), "timescale = 0"),
        (lambda: named("cosine_with_restarts", total_steps=9, num_cycles=0), "num_cycles = 0"),
        (lambda: named("cosine_with_restarts", total_steps=9, num_cycles=10), "a cycle needs at least one step"),
        (lambda: named("wsd", total_steps=100, decay_type="sqrt"), "use one of cosine, linear, 1-sqrt"),
        (lambda: named("wsd", total_steps=100, warmup_steps=60, decay_steps=50), "are more than total_steps = 100"),
        (lambda: named("wsd", decay_steps=5), "needs total_steps"),
    ],
)
def test_a_wrong_setting_says_what_would_be_right(call, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert says in str(caught.value)
