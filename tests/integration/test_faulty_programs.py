"""The faulty programs of benchmarks/faulty_programs build, run, and differ from their twins by the fault only."""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from faulty_programs import EVERY, HELD, LATER, NEXT, PROGRAMS, SPARE, UNSEEN, half
from faulty_programs.program import LABELS, Program, Setup, train

FAULTY = tuple(program for program in PROGRAMS if program.faults)
MAY_BE_NON_FINITE = {"non-finite", "precision", "exploding-gradient"}


def two_steps(program: Program, setup: Setup, *, faulty: bool) -> None:
    losses = train(setup, num_steps=2)
    allowed = faulty and MAY_BE_NON_FINITE & set(program.faults)
    assert allowed or all(map(math.isfinite, losses)), program.name
    assert 150 <= setup.num_steps <= 600, program.name


@pytest.mark.parametrize("family", sorted({program.family for program in PROGRAMS}))
def test_programs_run_and_start_where_their_twins_start(family: str) -> None:
    run_and_compare([p for p in PROGRAMS if p.family == family])


@pytest.mark.slow
def test_unseen_programs_run_and_start_where_their_twins_start() -> None:
    run_and_compare(UNSEEN)


@pytest.mark.slow
def test_later_programs_run_and_start_where_their_twins_start() -> None:
    run_and_compare(LATER)


@pytest.mark.slow
def test_next_programs_run_and_start_where_their_twins_start() -> None:
    run_and_compare(NEXT)


@pytest.mark.slow
def test_held_programs_run_and_start_where_their_twins_start() -> None:
    run_and_compare(HELD)


@pytest.mark.slow
def test_spare_programs_run_and_start_where_their_twins_start() -> None:
    run_and_compare(SPARE)


def run_and_compare(programs: Sequence[Program]) -> None:
    for program in programs:
        twin = program.build(False, 0)
        if program.faults:
            faulty = program.build(True, 0)
            if program.same_start:
                assert_same_weights(program, faulty, twin)
            two_steps(program, faulty, faulty=True)
        two_steps(program, twin, faulty=False)


def assert_same_weights(program: Program, faulty: Setup, twin: Setup) -> None:
    ours, theirs = faulty.model.state_dict(), twin.model.state_dict()
    assert ours.keys() == theirs.keys(), program.name
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), program.name


@pytest.mark.parametrize("name", ["text-dropout-as-keep-rate", "rl-no-kl-penalty", "gan-judge-too-strong"])
def test_a_seed_decides_everything(name: str) -> None:
    program = next(p for p in PROGRAMS if p.name == name)
    first, second = (train(program.build(True, 3), num_steps=5) for _ in range(2))
    assert first == second


def test_a_batch_can_be_judged_again() -> None:
    for program in FAULTY[::6]:
        setup = program.build(False, 0)
        batch = next(setup.batches())
        state = torch.get_rng_state()
        first = setup.loss(batch)
        torch.set_rng_state(state)  # dropout
        assert float(first.detach()) == float(setup.loss(batch).detach())


def test_the_set_is_as_large_and_as_mixed_as_it_says() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    best = Counter(program.faults[0] for program in FAULTY)
    assert len(FAULTY) >= 64
    assert len(PROGRAMS) - len(FAULTY) >= 16
    assert len(best) >= 22
    assert max(best.values()) <= 6
    assert set(best) <= set(LABELS)
    assert sum(program.source != "own" for program in FAULTY) * 2 >= len(FAULTY)


def test_the_unseen_set_stands_apart() -> None:
    assert len({program.name for program in EVERY}) == len(EVERY)
    assert {half(program) for program in UNSEEN} == {"unseen"}
    assert {half(program) for program in PROGRAMS} == {"develop", "sealed"}
    assert sum(bool(program.faults) for program in UNSEEN) >= 40
    assert sum(not program.faults for program in UNSEEN) >= 12


@pytest.mark.parametrize(("programs", "name"), [(LATER, "later"), (NEXT, "next"), (HELD, "held"), (SPARE, "spare")])
def test_the_later_sets_stand_apart(programs: Sequence[Program], name: str) -> None:
    assert {half(program) for program in programs} == {name}
    assert not set(programs) & set(PROGRAMS)
    faulty = [program for program in programs if program.faults]
    assert len(faulty) >= 40
    assert len(programs) - len(faulty) >= 12
    assert max(Counter(program.faults[0] for program in faulty).values()) <= 6
    assert sum(program.source != "own" for program in faulty) * 2 >= len(faulty)


def test_every_family_and_frequent_label_is_in_both_halves() -> None:
    families = {program.family for program in FAULTY}
    assert len(families) >= 9
    frequent = {label for label, count in Counter(p.faults[0] for p in FAULTY).items() if count > 1}
    for side in ("develop", "sealed"):
        assert {program.family for program in FAULTY if half(program) == side} == families
        assert frequent <= {program.faults[0] for program in FAULTY if half(program) == side}
        assert 0.4 <= sum(half(program) == side for program in PROGRAMS) / len(PROGRAMS) <= 0.6
