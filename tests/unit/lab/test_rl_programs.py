"""Programs of the RL lab: what their parts compute, that a seed fixes them, and what a collapse changes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadystep.lab.rl import COLLAPSES, PROGRAMS
from steadystep.lab.rl.control import ControlProgram, ControlSettings
from steadystep.lab.rl.program import CartPole, Grid, Point, clipped_surrogate
from steadystep.lab.rl.run import Planted, digest, final_level, final_reward, run_arm
from steadystep.lab.rl.token_programs import TokenProgram, TokenSettings, quantised
from steadystep.lab.rl.token_tasks import EOS, TASKS
from steadystep.lab.rl.values import DQN, SAC, Memory, ReplaySettings


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies begin untrained: half a second less for each."""
    monkeypatch.setattr(TokenProgram, "_warm_up", lambda self: None)


def quick_tokens(**settings: object) -> TokenProgram:
    return TokenProgram("sort", TokenSettings(warm_steps=2, **settings), seed=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_fixed_by_its_seed(name: str) -> None:
    one, other = PROGRAMS[name].make(5), PROGRAMS[name].make(5)
    torch.manual_seed(1)  # another state of torch's own generator
    for first, second in zip(one.batch(), other.batch(), strict=True):
        assert torch.equal(first, second)
    assert digest(one.model) == digest(other.model) != digest(PROGRAMS[name].make(6).model)


@pytest.mark.parametrize("name", ["grpo-sort", "ppo-grid", "dqn-grid", "sac-point"])
def test_loss_and_metrics_leave_no_trace(name: str) -> None:
    program = PROGRAMS[name].make(0)
    batch = program.batch()
    state, before = program.rng.get_state(), program.loss(batch).item()
    told = program.metrics(batch)
    program.score()
    assert torch.equal(program.rng.get_state(), state)
    assert program.loss(batch).item() == before
    assert all(isinstance(value, float) for value in told.values())
    assert told


@pytest.mark.parametrize("name", ["ppo-grid", "dqn-grid", "sac-point"])
def test_observed_and_plain_are_bit_identical(name: str) -> None:
    plain, observed = run_arm(name, 1, "plain", num_steps=24), run_arm(name, 1, "observe", num_steps=24)
    assert plain["digest"] == observed["digest"]
    assert plain["curve"] == observed["curve"]
    assert plain["digest"] != run_arm(name, 1, "plain", num_steps=23)["digest"]


def test_answers_earn_everything_and_the_best_path_is_best() -> None:
    rng = torch.Generator().manual_seed(0)
    for task in TASKS.values():
        prompts = task.prompts(16, rng)
        answers = task.answers(prompts)
        assert answers.shape == (16, task.max_len)
        assert torch.allclose(task.score(answers, answers), torch.ones(16))
        assert torch.allclose(task.grade(answers, answers), torch.ones(16))
        other = torch.randint(0, task.vocabulary, answers.shape, generator=rng)
        assert (task.score(other, answers) <= 1.0 + 1e-6).all()


def test_sums_are_right() -> None:
    answers = TASKS["sum"].answers(torch.tensor([[6, 6], [1, 3]]))  # 5 + 5 and 0 + 2
    assert answers[:, :3].tolist() == [[2, 1, EOS], [1, 3, EOS]]


def test_group_advantages_are_those_of_grpo() -> None:
    program = quick_tokens(num_prompts=2, group=4)
    rewards = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5])
    found = program._advantages(rewards)
    std = rewards[:4].std()
    assert torch.allclose(found[:4], torch.tensor([-0.5, -0.5, 0.5, 0.5]) / std, atol=1e-4)
    assert found[4:].tolist() == [0.0] * 4


def test_reinforce_leaves_the_sample_itself_out_of_its_baseline() -> None:
    program = quick_tokens(num_prompts=1, group=4, algorithm="reinforce")
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0])
    wanted = [float(r - rewards[torch.arange(4) != i].mean()) for i, r in enumerate(rewards)]
    assert program._advantages(rewards).tolist() == pytest.approx(wanted)


def test_sampler_and_learner_agree_where_they_are_the_same() -> None:
    program = quick_tokens()
    exact = program.metrics(program.batch())
    program.change({"sampler": "int2"})
    rounded = program.metrics(program.batch())
    assert exact["mismatch"] == 0.0
    assert rounded["mismatch"] > 0.05
    assert exact["ess"] == pytest.approx(1.0)
    assert rounded["ess"] < 0.999


def test_a_stale_sampler_keeps_the_weights_of_the_moment() -> None:
    program = quick_tokens(sampler="stale")
    stale = program._sampler()
    with torch.no_grad():
        program.model.head.bias += 1.0
    assert program._sampler() is stale
    assert not torch.equal(stale.head.bias, program.model.head.bias)


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=12), st.sampled_from(["bf16", "int4", "int2"]))
def test_rounding_twice_is_rounding_once(values: list[float], form: str) -> None:
    weights = torch.tensor(values)
    if not weights.abs().max() > 1e-3:
        return
    once = quantised(weights, form)
    assert torch.allclose(quantised(once, form), once, atol=1e-6)
    levels = {"bf16": 12, "int4": 15, "int2": 3}[form]
    assert len(once.unique()) <= levels


@given(st.floats(0.01, 5.0), st.floats(-3.0, 3.0))
def test_the_surrogate_never_pays_beyond_the_clip(ratio: float, advantage: float) -> None:
    loss = float(clipped_surrogate(torch.tensor(ratio), torch.tensor(advantage), 0.2))
    assert loss >= -advantage * ratio - 1e-5
    if advantage > 0:
        assert loss >= -1.2 * advantage - 1e-5


def test_generalised_advantages_against_the_sum_they_stand_for() -> None:
    program = ControlProgram("grid", ControlSettings(num_copies=1, gamma=0.9, trace=0.5), seed=0)
    values, rewards, overs = torch.tensor([[1.0], [2.0], [0.5]]), torch.tensor([[0.0], [1.0], [1.0]]), torch.zeros(3, 1)
    last = program._value(program._copies.seen).item()
    errors = [0.0 + 0.9 * 2.0 - 1.0, 1.0 + 0.9 * 0.5 - 2.0, 1.0 + 0.9 * last - 0.5]
    wanted = [sum(0.45**k * error for k, error in enumerate(errors[i:])) for i in range(3)]
    with torch.no_grad():
        assert program._advantages(values, rewards, overs).flatten().tolist() == pytest.approx(wanted, rel=1e-4)


def test_a_pole_falls_and_begins_anew() -> None:
    carts = CartPole(2, torch.Generator().manual_seed(0))
    ended = [bool(carts.step(torch.ones(2, dtype=torch.long))[3].any()) for _ in range(30)]
    assert any(ended)
    assert carts.seen.abs().max() < 3.0


def test_the_goal_pays_less_the_later_it_is_reached() -> None:
    grid = Grid(1, torch.Generator().manual_seed(0))
    grid._at = torch.tensor([[4, 3]])
    soon = float(grid.step(torch.tensor([0]))[0])
    grid._at, grid._age = torch.tensor([[4, 3]]), torch.tensor([7])
    late = float(grid.step(torch.tensor([0]))[0])
    assert soon == pytest.approx(1.0 - 0.5 / 16)
    assert late == pytest.approx(0.75)


def test_a_point_at_rest_in_the_middle_is_paid_in_full() -> None:
    point = Point(1, torch.Generator().manual_seed(0))
    point._state = torch.zeros(1, 2)
    assert float(point.step(torch.zeros(1))[0]) == 1.0


def test_memory_overwrites_the_oldest() -> None:
    memory = Memory(4)
    memory.add(torch.arange(3))
    memory.add(torch.arange(3, 6))
    (drawn,) = memory.draw(64, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {2, 3, 4, 5}


def test_the_three_losses_of_sac_reach_only_their_own_parameters() -> None:
    program = SAC(ReplaySettings(), seed=0)
    critic, actor, heat, _, _ = program._losses(program.batch())
    for loss, owner in ((critic, "critics"), (actor, "actor"), (heat, "log_alpha")):
        gradients = torch.autograd.grad(loss, list(program.model.parameters()), allow_unused=True, retain_graph=True)
        names = [name for name, _ in program.model.named_parameters()]
        reached = {name.split(".")[0] for name, g in zip(names, gradients, strict=True) if g is not None and g.any()}
        assert reached == {owner}


def test_a_change_and_its_end() -> None:
    program = DQN("grid", ReplaySettings(lr=1e-3), seed=0)
    before = program.change({"lr_mult": 30.0, "online_target": True})
    assert program.optimizers[0].param_groups[0]["lr"] == pytest.approx(3e-2)
    program.change(before)
    assert program.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)
    assert program.settings.online_target is False
    with pytest.raises(AttributeError, match="nonsense"):
        program.change({"nonsense": 1})


def test_every_collapse_changes_what_its_program_has() -> None:
    for planted in COLLAPSES.values():
        program = PROGRAMS[planted.program].make(0)
        before = program.change(planted.changes)
        assert before.keys() == planted.changes.keys()
        assert all(before[name] != value for name, value in planted.changes.items())
        assert planted.first_step(3) + 50 < PROGRAMS[planted.program].num_steps
        assert planted.causes


def test_a_collapse_begins_and_ends_at_its_steps() -> None:
    planted, program = Planted(COLLAPSES["wrong sign, a2c"], seed=1), PROGRAMS["a2c-grid"].make(1)
    signs = []
    for step in range(240):
        planted.at(step, program)
        signs.append(program.settings.advantage_mult)
    assert [step for step, sign in enumerate(signs) if sign < 0] == list(range(154, 194))


def test_the_score_of_lost_weights_is_nan_and_counts_as_final() -> None:
    program = PROGRAMS["ppo-grid"].make(0)
    with torch.no_grad():
        program.actor[0].weight[0, 0] = math.nan  # type: ignore[attr-defined]
    assert math.isnan(program.score())
    assert math.isnan(final_reward(program))
    assert math.isnan(final_level([1.0, 1.0, math.nan]))


def test_the_final_reward_is_that_of_the_weights_that_are_left() -> None:
    """Not of those 30 steps before, and not by the rollouts that a guard may have played."""
    program = PROGRAMS["ppo-grid"].make(0)
    scores = [program.rollouts(seed) for seed in (4, 5, 6, 7)]
    assert final_reward(program) == pytest.approx(sum(scores) / 4)
    assert program.played == 0
