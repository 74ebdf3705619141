"""One watcher over several optimizers: steps after one loss are one decision, and turns are rolled back together."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as entropy
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

import steadystep
from steadystep.errors import UnsupportedError
from steadystep.records import Outcome
from tests.loops import batches, full_state, small_net, squared

Each = Callable[[int], None]


class Restless(SGD):
    """Counts on itself, and moves its weights without a gradient."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(0.0 if parameter.grad is None else parameter.grad, alpha=-0.01).mul_(0.999)


def of_kinds(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return [Muon(matrices, lr=0.01), AdamW(vectors, lr=0.003)]


def with_restless(model: nn.Module) -> list[Optimizer]:
    half = list(model.parameters())
    return [Adam(half[:4], lr=0.01), Restless(half[4:], lr=0.01)]


def bits(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    counts = [getattr(optimizer, "count", 0) for optimizer in optimizers]
    return dict(leaves([model.state_dict(), counts, *(optimizer.state_dict() for optimizer in optimizers)], ""))


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, tree.detach().clone() if isinstance(tree, Tensor) else tree


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]) if isinstance(value, Tensor) else value == right[name], name


def one_loss(
    make: Callable[[nn.Module], list[Optimizer]],
    *,
    watched: bool,
    bad: int | None = None,
    clips: bool = False,
    steps: int = 40,
) -> tuple[dict[str, Any], list[Outcome]]:
    """One loss for all of them. The batch `bad` is NaN; without a watcher it is left out."""
    model = small_net(dropout=0.0)
    optimizers, outcomes = make(model), []
    watcher = steadystep.watch(model, optimizers) if watched else None
    for step, x in enumerate(batches(steps)):
        if step == bad and watcher is None:
            continue
        squared(model, x * math.nan if step == bad else x).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if watcher is not None:
            outcomes.append(watcher.outcome)
    state = bits(model, optimizers)
    if watcher is not None:
        assert watcher.guard.attempts == steps
        watcher.remove()
    return state, outcomes


@pytest.mark.parametrize("make", [of_kinds, with_restless])
@pytest.mark.parametrize("clips", [False, True])
def test_a_healthy_loop_is_bit_identical(make: Any, clips: bool) -> None:
    watched, outcomes = one_loss(make, watched=True, clips=clips)
    assert [outcome.step for outcome in outcomes] == list(range(40))
    assert_same(watched, one_loss(make, watched=False, clips=clips)[0])


@pytest.mark.parametrize("make", [of_kinds, with_restless])
@pytest.mark.parametrize("bad", [0, 17])
def test_a_refused_step_is_refused_for_all(make: Any, bad: int) -> None:
    watched, outcomes = one_loss(make, watched=True, bad=bad)
    assert [outcome.stepped for outcome in outcomes] == [step != bad for step in range(40)]
    assert_same(watched, one_loss(make, watched=False, bad=bad)[0])


def test_all_go_back_to_the_same_update() -> None:
    model = small_net(dropout=0.0)
    optimizers = [Adam(list(model.parameters())[:4], lr=0.01), Adam(list(model.parameters())[4:], lr=0.01)]
    with steadystep.watch(model, optimizers) as watcher:
        backs = []
        for step, x in enumerate(batches(100)):
            if step == 70:
                with torch.no_grad():
                    model[-1].weight[0, 0] = math.nan
            squared(model, x).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            backs += [watcher.outcome] if watcher.outcome.restored is not None else []
        (back,) = backs
        assert back.step == 70
        counts = {int(slots["step"]) for optimizer in optimizers for slots in optimizer.state.values()}
        assert counts == {watcher.guard.updates}
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("clips", [False, True])
def test_updates_of_several_optimizers_are_made_again(clips: bool) -> None:
    """A flipped weight at step 70: the run ends with the bits of the one without it."""

    def run(at: int | None) -> tuple[dict[str, Tensor], list[steadystep.Outcome]]:
        model = small_net(dropout=0.0)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        optimizers: list[Optimizer] = [
            torch.optim.Muon(matrices, lr=0.01),
            Adam([p for p in model.parameters() if p.ndim != 2], lr=0.01),
        ]
        with steadystep.watch(model, optimizers) as watcher:
            acts = []
            for step, x in enumerate(batches(100)):
                if step == at:
                    with torch.no_grad():
                        model[-1].weight[0, 0] = math.nan
                squared(model, x).backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                acts += [watcher.outcome] if watcher.outcome.plan.actions else []
        states = [full_state(model, optimizer) for optimizer in optimizers]
        return {f"{i}.{key}": value for i, state in enumerate(states) for key, value in state.items()}, acts

    torch._dynamo.utils.counters.clear()  # of another test of this process: `watch` then keeps its mode out of the way
    clean, nothing = run(None)
    state, (act,) = run(70)
    assert not nothing
    assert act.plan.actions[:2] == ("rollback", "replay")
    assert act.exact
    assert_same(clean, state)


def halves(model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [Adam(parameters[:2], lr=0.01), Adam(parameters[2:], lr=0.01)]


@pytest.mark.parametrize("width", [4, 16, 64])
def test_gradients_that_lie_where_the_last_ones_lay_are_new(width: int) -> None:
    """Cleared at the start of the loop, after the decision was closed: the allocator gives the same places again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
    optimizers = halves(model)
    with steadystep.watch(model, optimizers) as watcher:
        for _ in range(100):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert (watcher.guard.attempts, watcher.guard.updates) == (100, 100)


def test_they_are_new_in_a_loop_that_says_its_losses_too() -> None:
    """The very same tensors, to have the same places in every run."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizers = halves(model)
    gradients = [torch.ones_like(p) for p in model.parameters()]
    with steadystep.watch(model, optimizers, find_loss=False) as watcher:
        for count in range(1, 6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            watcher.loss(torch.tensor(1.0))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()
            assert watcher.guard.attempts == count


def test_a_loss_that_was_said_once_serves_optimizers_that_are_decided_about_by_themselves() -> None:
    """Their gradients are unscaled one by one, each in its step."""
    model = small_net(dropout=0.0)
    optimizers = halves(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with steadystep.watch(model, optimizers, scaler=scaler, find_loss=False) as watcher:
        for x in batches(5):
            scaler.scale(watcher.loss(squared(model, x))).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        assert watcher.guard.updates == 10


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("to_none", [False, True])
def test_no_optimizer_is_stepped_again_that_the_loop_did_not_step(every: int, to_none: bool) -> None:
    """The second one is stepped every third time, after the same loss: then a rollback loses the updates since."""
    model = small_net(dropout=0.0)
    optimizers = halves(model)
    first, second = (optimizer.state for optimizer in optimizers)
    taken: dict[int, int] = {}
    with steadystep.watch(model, optimizers) as watcher:
        for step, x in enumerate(batches(71)):
            if step == 70:
                with torch.no_grad():
                    model[-1].weight[0, 0] = math.nan
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=to_none)
            squared(model, x).backward()
            for optimizer in optimizers[: 1 if (step + 1) % every else 2]:
                optimizer.step()
            if every <= step + 1 < 71:
                taken[steps_of(first)] = steps_of(second)
    assert watcher.outcome.restored is not None
    assert "rollback" in watcher.outcome.plan.actions
    if every == 1:
        assert watcher.outcome.exact
        assert (steps_of(first), steps_of(second)) == (71, 71)
    else:
        assert watcher.outcome.replayed == 0
        assert steps_of(second) == taken[steps_of(first)]


def test_the_first_update_is_made_again_though_it_was_closed_before_its_last_step() -> None:
    """Who follows whom is not known by then."""
    model = small_net(dropout=0.0)
    optimizers = halves(model)
    with steadystep.watch(model, optimizers) as watcher:
        for x in batches(5):
            squared(model, x).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        missed = watcher.guard._parts.recovery.missed(0)
    assert [done.updates for done in missed] == [1, 2, 3, 4, 5]


def steps_of(state: Any) -> int:
    return int(next(iter(state.values()))["step"])


class Gan:
    """A generator and its critic, each with an optimizer and a loss of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        self.both = nn.ModuleList([self.maker, self.critic])
        self.optimizers: list[Optimizer] = [
            Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.99)),
            Adam(self.maker.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        ]
        self.rng = torch.Generator().manual_seed(3)

    def turn_of_critic(self, x: Tensor) -> None:
        opt = self.optimizers[0]
        opt.zero_grad()
        made = self.maker(torch.randn(32, 4, generator=self.rng)).detach()
        real = entropy(self.critic(x), torch.ones(32, 1))
        (real + entropy(self.critic(made), torch.zeros(32, 1))).backward()
        opt.step()

    def turn_of_maker(self) -> None:
        opt = self.optimizers[1]
        opt.zero_grad()
        made = self.maker(torch.randn(32, 4, generator=self.rng))
        entropy(self.critic(made), torch.ones(32, 1)).backward()
        opt.step()

    def train(self, steps: int, *, critics: int = 1, each: Callable[["Gan", int, Tensor], None] | None = None) -> None:
        for step in range(steps):
            for _ in range(critics):
                x = 0.3 * torch.randn(32, 2, generator=self.rng) + torch.tensor([1.0, -1.0])
                if each is not None:
                    each(self, step, x)
                self.turn_of_critic(x)
            self.turn_of_maker()


@pytest.mark.parametrize("critics", [1, 3])
def test_a_healthy_gan_is_bit_identical(critics: int) -> None:
    plain, gan = Gan(), Gan()
    plain.train(60, critics=critics)
    with steadystep.watch(gan.both, gan.optimizers) as watcher:
        gan.train(60, critics=critics)
        assert watcher.guard.attempts == 60 * (critics + 1)
    assert_same(bits(gan.both, gan.optimizers), bits(plain.both, plain.optimizers))


def test_both_networks_of_a_gan_go_back_together() -> None:
    gan, outcomes = Gan(), []

    def damage(gan: Gan, step: int, x: Tensor) -> None:
        if step == 60:
            with torch.no_grad():
                gan.maker[0].weight[0, 0] = math.nan

    with steadystep.watch(gan.both, gan.optimizers) as watcher:
        watcher._tell = outcomes.append
        gan.train(80, each=damage)
        (back,) = [outcome for outcome in outcomes if outcome.restored is not None]
        assert "rollback" in back.plan.actions
        steps = [int(next(iter(optimizer.state.values()))["step"]) for optimizer in gan.optimizers]
        assert sum(steps) == watcher.guard.updates
        assert abs(steps[0] - steps[1]) <= 1
    assert all(p.isfinite().all() for p in gan.both.parameters())


def test_a_bad_batch_of_one_player_is_refused_in_its_turn() -> None:
    gan, outcomes = Gan(), []

    def spoil(gan: Gan, step: int, x: Tensor) -> None:
        if step == 30:
            x.fill_(math.nan)

    with steadystep.watch(gan.both, gan.optimizers) as watcher:
        watcher._tell = outcomes.append
        gan.train(40, each=spoil)
    assert [outcome.step for outcome in outcomes if not outcome.stepped] == [60]
    assert all(p.isfinite().all() for p in gan.both.state_dict().values())


def test_actor_critic_and_temperature() -> None:
    """The actor's loss reaches the critic as well, which is updated in another turn; and it is updated more seldom."""

    def run(*, watched: bool) -> tuple[dict[str, Any], int]:
        torch.manual_seed(0)
        actor, critic, alpha = nn.Linear(3, 2), nn.Linear(5, 1), nn.Module()
        alpha.log = nn.Parameter(torch.zeros(()))
        everything = nn.ModuleList([actor, critic, alpha])
        optimizers = [Adam(part.parameters(), lr=0.01) for part in (critic, actor, alpha)]
        watcher = steadystep.watch(everything, optimizers) if watched else None
        for step, x in enumerate(batches(60)):
            seen, reward = x[:, :3], x.sum(-1, keepdim=True)
            losses = [lambda s=seen, r=reward: (critic(torch.cat([s, actor(s).detach()], -1)) - r).square().mean()]
            if step % 2:
                losses.append(
                    lambda s=seen: (
                        alpha.log.exp().detach() * actor(s).square().mean()
                        - critic(torch.cat([s, actor(s)], -1)).mean()
                    )
                )
                losses.append(lambda s=seen: alpha.log.exp() * (1.0 - actor(s).square().mean().detach()))
            for optimizer, loss in zip(optimizers, losses, strict=False):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
        attempts = 0 if watcher is None else watcher.guard.attempts
        if watcher is not None:
            watcher.remove()
        return bits(everything, optimizers), attempts

    watched, attempts = run(watched=True)
    assert attempts == 60 + 2 * 30
    assert_same(watched, run(watched=False)[0])


@pytest.mark.parametrize("unscales", [False, True])
def test_with_a_loss_scaler(unscales: bool) -> None:
    def run(*, watched: bool) -> dict[str, Any]:
        model = small_net(dropout=0.0)
        optimizers = of_kinds(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        watcher = steadystep.watch(model, optimizers, scaler=scaler) if watched else None
        for x in batches(30):
            scaler.scale(squared(model, x)).backward()
            if unscales:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
        if watcher is not None:
            assert watcher.guard.attempts == (30 if unscales else 60)
            watcher.remove()
        return bits(model, optimizers)

    assert_same(run(watched=True), run(watched=False))


def test_schedulers_of_all_are_found_and_a_refused_step_moves_none() -> None:
    model = small_net(dropout=0.0)
    optimizers = of_kinds(model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    with steadystep.watch(model, optimizers):
        for step, x in enumerate(batches(10)):
            squared(model, x * math.nan if step == 5 else x).backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    assert [scheduler.last_epoch for scheduler in schedulers] == [9, 9]
    assert optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**9)


def test_what_it_remembers_is_saved_for_each() -> None:
    gan, other = Gan(), Gan()
    with steadystep.watch(gan.both, gan.optimizers) as watcher:
        gan.train(30)
        saved = json.loads(json.dumps(watcher.guard.state_dict()))
    assert any(name.endswith("of optimizer 1") for name in saved)
    with steadystep.watch(other.both, other.optimizers) as again:
        again.guard.load_state_dict(saved)
        assert json.loads(json.dumps(again.guard.state_dict())) == saved


def test_a_closure_is_refused() -> None:
    model = small_net()
    optimizers = of_kinds(model)
    with steadystep.watch(model, optimizers), pytest.raises(UnsupportedError, match="one watcher for each"):
        optimizers[1].step(lambda: squared(model, batches(1)[0]))


@pytest.mark.parametrize("way", [*(pytest.param(w, marks=pytest.mark.slow) for w in ("alone", "guards")), "list"])
def test_a_critic_that_has_met_its_match_is_no_run_that_does_not_learn(way: str) -> None:
    """Real and made are drawn alike, so its loss stands at ln 4: what guessing costs, and in a GAN the aim."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    maker = nn.Linear(2, 2)
    pair: list[Optimizer] = [Adam(critic.parameters(), lr=1e-3), Adam(maker.parameters(), lr=1e-5)]
    found = []

    def judged() -> Tensor:
        real, made = critic(torch.randn(256, 2)), critic(torch.randn(256, 2))
        return entropy(real, torch.ones(256, 1)) + entropy(made, torch.zeros(256, 1))

    def fooled() -> Tensor:
        return entropy(critic(maker(torch.randn(256, 2))), torch.ones(256, 1))

    if way == "list":
        with steadystep.watch(nn.ModuleList([critic, maker]), pair) as watcher:
            for step in range(800):
                loss = fooled() if step % 2 else judged()
                loss.backward()
                pair[step % 2].step()
                pair[step % 2].zero_grad()
                found += [f.detector for f in watcher.outcome.findings]
            cause = watcher.guard.diagnose()[0].cause
    else:
        guards = [steadystep.Guard(critic, pair[0]), steadystep.Guard(maker, pair[1])]
        for _ in range(400):
            found += [f.detector for f in guards[0].step(judged).findings]
            if way == "guards":
                guards[1].step(fooled)
        cause = guards[0].diagnose()[0].cause
    assert ("no-learning" in found) == (way == "alone")
    assert cause == "healthy" or way == "alone"
