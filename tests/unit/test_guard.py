"""The facade: what it accepts, what it refuses, and what an interruption leaves behind."""

import gc
import math

import pytest
import torch
from torch import Tensor, nn

import steadystep
from tests.loops import assert_same, batches, full_state, small_net, squared


class BoomError(Exception):
    pass


def sgd(model: nn.Module, **kwargs) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **kwargs)


def test_a_loss_and_a_closure_do_the_same() -> None:
    ends = []
    for style in ("loss", "closure", "batch"):
        model = small_net()
        optimizer = sgd(model)
        guard = steadystep.Guard(model, optimizer)
        torch.manual_seed(2)
        for x in batches(5):
            if style == "batch":
                guard.step(lambda given, model=model: squared(model, given), batch=x)
            else:
                guard.step(squared(model, x) if style == "loss" else lambda x=x, model=model: squared(model, x))
        ends.append(full_state(model, optimizer))
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


def test_the_outcome_says_what_was_seen() -> None:
    model = small_net()
    guard = steadystep.Guard(model, sgd(model))
    x = batches(1)[0]
    outcome = guard.step(lambda: squared(model, x))
    assert type(outcome.loss) is float
    assert outcome.stepped
    assert outcome.plan.proceeds
    assert outcome.findings == ()
    assert outcome.signals.names[0] == "0.weight"
    assert len(outcome.signals.norms) == len(list(model.parameters()))
    assert outcome.signals.grad_norm == pytest.approx(math.sqrt(sum(n * n for n in outcome.signals.norms)))
    assert outcome.signals.lr == 0.1
    assert (guard.attempts, guard.updates) == (1, 1)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_state_and_guard_as_they_were(where: str) -> None:
    model = small_net()
    optimizer = sgd(model, momentum=0.9)
    guard = steadystep.Guard(model, optimizer)
    x = batches(1)[0]
    guard.step(lambda: squared(model, x))
    before = full_state(model, optimizer)

    def explode(loss: Tensor) -> Tensor:
        if where == "forward":
            raise BoomError
        loss.register_hook(lambda _: (_ for _ in ()).throw(BoomError()))
        return loss * 1.0

    with pytest.raises(BoomError):
        guard.step(lambda: explode(squared(model, x)))
    assert_same(before, full_state(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
    assert guard.attempts == 1
    assert guard.step(lambda: squared(model, x)).stepped


def test_ctrl_c_inside_a_closure_is_an_exception_like_any_other() -> None:
    model = small_net()
    optimizer = sgd(model)
    guard = steadystep.Guard(model, optimizer)
    x = batches(1)[0]
    before = full_state(model, optimizer)

    def interrupted() -> Tensor:
        squared(model, x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.step(interrupted)
    assert_same(before, full_state(model, optimizer))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_inside_a_group_costs_only_its_own_micro_batch(where: str) -> None:
    """Bit-identical to the group without it: the others are computed again in the same order."""
    data = batches(3)
    model, twin = small_net(), small_net()
    config = {"training": {"gradient_accumulation_steps": 3}}
    guard, twin_guard = (steadystep.Guard(m, sgd(m), config=config) for m in (model, twin))

    def explode() -> Tensor:
        state = torch.get_rng_state()
        loss = squared(model, data[0] * 2)
        torch.set_rng_state(state)
        if where == "forward":
            raise BoomError
        loss.register_hook(lambda _: (_ for _ in ()).throw(BoomError()))
        return loss * 1.0

    torch.manual_seed(4)
    guard.step(lambda: squared(model, data[0]))
    guard.step(lambda: squared(model, data[1]))
    with pytest.raises(BoomError):
        guard.step(explode)
    outcome = guard.step(lambda: squared(model, data[2]))
    torch.manual_seed(4)
    for x in data:
        expected = twin_guard.step(lambda x=x: squared(twin, x))
    assert outcome.stepped
    assert outcome.loss == expected.loss
    assert_same(full_state(model, guard._optimizer), full_state(twin, twin_guard._optimizer))


def test_an_interrupted_group_whose_closures_do_not_repeat_is_dropped() -> None:
    model = small_net()
    guard = steadystep.Guard(model, sgd(model), config={"training": {"gradient_accumulation_steps": 2}})
    before = full_state(model, guard._optimizer)
    feed = iter([batches(1)[0], *(x * 9 for x in batches(9, seed=3))])

    def explode() -> Tensor:
        raise BoomError

    guard.step(lambda: squared(model, next(feed)))
    with pytest.raises(BoomError):
        guard.step(explode)
    with pytest.warns(UserWarning, match="a different loss"):
        outcome = guard.step(lambda: squared(model, next(feed)))
    assert not outcome.stepped
    assert outcome.plan.reason == "closure-not-repeatable"
    assert_same(before, full_state(model, guard._optimizer))
    x = batches(1)[0]
    assert guard.step(lambda: squared(model, x)).pending


def test_step_inside_step_is_refused() -> None:
    model = small_net()
    guard = steadystep.Guard(model, sgd(model))
    x = batches(1)[0]
    with pytest.raises(steadystep.MisuseError, match="inside step"):
        guard.step(lambda: guard.step(lambda: squared(model, x)))
    assert guard.step(lambda: squared(model, x)).stepped


def test_a_second_guard_on_one_optimizer_is_refused_until_the_first_lets_go() -> None:
    model = small_net()
    optimizer = sgd(model)
    guard = steadystep.Guard(model, optimizer)
    with pytest.raises(steadystep.MisuseError, match="already has a guard"):
        steadystep.Guard(model, optimizer)
    guard.close()
    with steadystep.Guard(model, optimizer):
        pass
    second = steadystep.Guard(model, optimizer)
    second.itself = second  # a reference cycle, as a notebook leaves them
    del second
    steadystep.Guard(model, optimizer)


def test_two_guards_on_two_optimizers_of_one_model_measure_their_own_part() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    guards = [steadystep.Guard(model, torch.optim.SGD(part.parameters(), lr=0.1)) for part in model]
    x = batches(1)[0]
    assert guards[0].step(lambda: squared(model, x)).signals.names == ("0.weight", "0.bias")
    model.zero_grad()
    assert guards[1].step(lambda: squared(model, x)).signals.names == ("1.weight", "1.bias")


def test_models_and_optimizers_that_cannot_train_are_refused() -> None:
    model = small_net()
    with pytest.raises(steadystep.MisuseError, match=r"must be a torch\.nn\.Module"):
        steadystep.Guard([model], sgd(model))
    with pytest.raises(steadystep.MisuseError, match=r"must be a torch\.optim\.Optimizer"):
        steadystep.Guard(model, "adam")
    other = small_net()
    with pytest.raises(steadystep.MisuseError, match="none of this model's parameters"):
        steadystep.Guard(model, sgd(other))
    frozen = small_net().requires_grad_(False)
    with pytest.raises(steadystep.MisuseError, match="nothing to train"):
        steadystep.Guard(frozen, sgd(frozen))
    guard = steadystep.Guard(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(steadystep.UnsupportedError, match=r"LBFGS calls the closure itself.*steadystep\.watch"):
        guard.step(lambda: squared(model, batches(1)[0]))
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(steadystep.UnsupportedError, match="not initialized"):
        steadystep.Guard(lazy, sgd(lazy))


@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda model, x: 3.0, "returned float"),
        (lambda model, x: (squared(model, x), None), "returned tuple"),
        (lambda model, x: model(x), r"shape \[8x1\]"),
        (lambda model, x: squared(model, x).detach(), "no graph"),
        (lambda model, x: torch.tensor(1), "one real number"),
    ],
)
def test_a_closure_that_returns_no_loss_is_told_so(closure, message: str) -> None:
    model = small_net()
    guard = steadystep.Guard(model, sgd(model))
    x = batches(1)[0]
    with pytest.raises(steadystep.MisuseError, match=message):
        guard.step(lambda: closure(model, x))
    assert guard.step(lambda: squared(model, x)).stepped


def test_a_loss_of_shape_one_is_a_loss() -> None:
    model = small_net()
    guard = steadystep.Guard(model, sgd(model))
    x = batches(1)[0]
    assert guard.step(lambda: squared(model, x).reshape(1)).stepped


def test_unused_frozen_and_tied_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.tied = nn.Linear(6, 6)
            self.tied.weight = self.used.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.tied(self.frozen(self.used(x)))

    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters())
    guard = steadystep.Guard(model, optimizer)
    before = full_state(model, optimizer)
    x = batches(1)[0]
    outcome = guard.step(lambda: model(x).square().mean())
    assert outcome.signals.names == ("used.weight", "used.bias", "tied.bias")
    after = full_state(model, optimizer)
    assert torch.equal(before["model.unused.weight"], after["model.unused.weight"])
    assert not torch.equal(before["model.used.weight"], after["model.used.weight"])


def test_a_loss_that_reaches_no_parameter_steps_as_a_plain_loop_would() -> None:
    model = small_net()
    for precision in ("fp32", "fp16"):
        optimizer = sgd(model)
        config = {"training": {"mixed_precision": precision, "max_grad_norm": 1.0}}
        guard = steadystep.Guard(model, optimizer, config=config)
        other = torch.ones(1, requires_grad=True)
        for _ in range(2):
            outcome = guard.step(lambda other=other: other.sum() * 2)
            assert outcome.stepped
            assert outcome.signals.grad_norm == 0.0


def test_a_parameter_group_added_later_is_measured() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    guard = steadystep.Guard(model, optimizer)
    x = batches(1)[0]
    guard.step(lambda: squared(model, x))
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.3})
    model.zero_grad()
    outcome = guard.step(lambda: squared(model, x))
    assert outcome.signals.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert outcome.signals.lr == 0.3


def test_parameters_outside_the_model_are_measured_too() -> None:
    model = nn.Linear(6, 1)
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    guard = steadystep.Guard(model, optimizer)
    x = batches(1)[0]
    assert guard.step(lambda: squared(model, x) * temperature).signals.names[-1] == "optimizer parameter 0"


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_gradients_are_measured_clipped_and_gated(coalesced: bool) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = steadystep.Guard(model, optimizer, config={"training": {"max_grad_norm": 1.0}})
    tokens = torch.tensor([1, 2] if coalesced else [1, 1, 2])
    dense = nn.Embedding(10, 4)
    dense.load_state_dict(model.state_dict())
    (dense(tokens).sum() * 5).backward()
    expected = torch.nn.utils.clip_grad_norm_(dense.parameters(), 1.0)
    before = model.weight.detach().clone()
    outcome = guard.step(lambda: model(tokens).sum() * 5)
    assert outcome.clipped
    assert outcome.signals.grad_norm == pytest.approx(expected.item())
    torch.testing.assert_close(before - model.weight.detach(), dense.weight.grad)
    before = model.weight.detach().clone()
    assert not guard.step(lambda: model(tokens).sum() * math.nan).stepped
    assert torch.equal(before, model.weight)


def test_a_gradient_that_turns_sparse_later_is_followed() -> None:
    model = nn.Embedding(10, 4)
    guard = steadystep.Guard(model, sgd(model))
    tokens = torch.tensor([1, 1, 2])
    first = guard.step(lambda: model(tokens).sum())
    model.sparse = True
    second = guard.step(lambda: model(tokens).sum())
    assert second.stepped
    assert first.signals.grad_norm == pytest.approx(second.signals.grad_norm)


def test_complex_parameters() -> None:
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.w = nn.Parameter(torch.randn(4))

        def forward(self) -> Tensor:
            return (self.z * self.w).abs().sum()

    model = Phase()
    guard = steadystep.Guard(model, sgd(model), config={"training": {"max_grad_norm": 0.5}})
    expected = torch.autograd.grad(model(), list(model.parameters()))
    norm = torch.stack([g.abs().square().sum() for g in expected]).sum().sqrt().item()
    assert guard.step(model).signals.grad_norm == pytest.approx(norm)
    assert not guard.step(lambda: model() * math.nan).stepped
    by_value = steadystep.Guard(model, sgd(model), config={"training": {"max_grad_value": 0.5}})
    with pytest.raises(steadystep.UnsupportedError, match="complex"):
        by_value.step(model)


def test_value_clipping_matches_torch() -> None:
    plain, guarded = small_net(), small_net()
    optimizers = [sgd(m) for m in (plain, guarded)]
    guard = steadystep.Guard(guarded, optimizers[1], config={"training": {"max_grad_value": 0.01}})
    for x in batches(6):
        torch.manual_seed(3)
        squared(plain, x).backward()
        torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
        optimizers[0].step()
        optimizers[0].zero_grad()
        torch.manual_seed(3)
        guard.step(lambda x=x: squared(guarded, x))
    assert_same(full_state(plain, optimizers[0]), full_state(guarded, optimizers[1]))


@pytest.mark.parametrize("rule", ["zscore", "percentile"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_learned_limit_holds_back_what_stands_out_and_resumes(rule: str, max_norm: float | None) -> None:
    """The same as the rule alone, asked about the same norms; the fixed limit still holds."""
    model = small_net(dropout=0.0)
    alone = {"zscore": steadystep.clip.ZScoreClip, "percentile": steadystep.clip.PercentileClip}[rule]()
    config = {"training": {"clip_rule": rule, "max_grad_norm": max_norm}}
    guard = steadystep.Guard(model, sgd(model), config=config)
    for i, x in enumerate(batches(40)):
        before = model[6].bias.detach().clone()
        factor = 1e3 if i == 35 else 1.0
        outcome = guard.step(lambda x=x, factor=factor: squared(model, x) * factor)
        norm = outcome.signals.grad_norm
        limit = min(alone.limit(norm), max_norm or math.inf)
        alone.learn(norm)
        assert outcome.clipped == (norm > limit)
        applied = (before - model[6].bias.detach()).norm().item() / 0.1
        own = outcome.signals.norms[-1]
        assert applied == pytest.approx(own * min(1.0, limit / norm), rel=1e-3, abs=1e-6)
        if i == 35:
            assert outcome.clipped
    twin = small_net()
    again = steadystep.Guard(twin, sgd(twin), config=config)
    again.load_state_dict(guard.state_dict())
    assert again.state_dict()["clip rule"] == guard.state_dict()["clip rule"]


def test_metrics_must_be_scalars() -> None:
    model = small_net()
    guard = steadystep.Guard(model, sgd(model))
    x = batches(1)[0]
    with pytest.raises(steadystep.MisuseError, match=r"metrics\['kl'\]"):
        guard.step(lambda: squared(model, x), metrics={"kl": torch.ones(3)})
    with pytest.raises(steadystep.MisuseError, match=r"metrics\['name'\] must be one real number, got str"):
        guard.step(lambda: squared(model, x), metrics={"name": "x"})
    assert guard.step(lambda: squared(model, x)).signals.metrics == {}
    good = {"kl": torch.ones(1), "ratio": 2, "when": torch.tensor(3)}
    assert guard.step(lambda: squared(model, x), metrics=good).signals.metrics == {"kl": 1.0, "ratio": 2.0, "when": 3.0}
    assert guard.step(lambda: squared(model, x)).signals.metrics == {}


def test_a_tensor_loss_under_mixed_precision_warns_once() -> None:
    model = small_net()
    guard = steadystep.Guard(model, sgd(model), config={"training": {"mixed_precision": "bf16"}})
    x = batches(1)[0]
    with pytest.warns(UserWarning, match="before the guard could autocast"):
        guard.step(squared(model, x))
    guard.step(squared(model, x))
    own = small_net()
    quiet = steadystep.Guard(own, sgd(own), config={"training": {"mixed_precision": "bf16", "autocast": False}})
    quiet.step(squared(own, x))


def test_a_guard_does_not_keep_model_or_batches_alive() -> None:
    import weakref

    model = small_net()
    guard = steadystep.Guard(model, sgd(model), config={"training": {"auto_recovery": False}})
    x = batches(1)[0]
    seen = weakref.ref(x)
    guard.step(lambda given: squared(model, given), batch=x)
    del x
    assert seen() is None
    alive = weakref.ref(guard)
    del guard
    gc.collect()
    assert alive() is None


def test_healthy_updates_after_an_incident_match_a_run_without_it() -> None:
    data = batches(10)
    model, twin = small_net(dropout=0.0), small_net(dropout=0.0)
    guards = [steadystep.Guard(m, torch.optim.AdamW(m.parameters())) for m in (model, twin)]
    for i, x in enumerate(data):
        if i == 5:
            guards[0].step(lambda x=x: squared(model, x * math.nan))
        for guard, m in zip(guards, (model, twin), strict=True):
            guard.step(lambda x=x, m=m: squared(m, x))
    assert_same(full_state(model, guards[0]._optimizer), full_state(twin, guards[1]._optimizer))


def test_gradients_are_cleared_as_the_optimizer_would() -> None:
    calls = []

    class Counting(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append(set_to_none)
            super().zero_grad(set_to_none=set_to_none)

    for optimizer_type in (torch.optim.SGD, Counting):
        model = torch.nn.Linear(2, 1)
        guard = steadystep.Guard(model, optimizer_type(model.parameters(), lr=0.1))
        guard.step(lambda model=model: model(torch.ones(3, 2)).mean())
        assert all(p.grad is None for p in model.parameters())
    assert calls == [True]
