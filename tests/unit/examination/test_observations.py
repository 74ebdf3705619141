"""What a few passes show: the parts of a batch, what outputs depend on, and parameters that nothing moves."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler

from steadystep.examination.dependence import (
    by_sample,
    depends_on_input,
    depends_on_later,
    depends_on_neighbors,
    rewards_certainty,
    share_of_own_target,
    spread_of_outputs,
)
from steadystep.examination.parameters import leaves_of, next_rates, observe_parameters, reached, rounding_of
from steadystep.examination.passes import observe_passes, over_batches
from steadystep.examination.repairs import restart
from steadystep.examination.workbench import Workbench
from tests.unit.examination.jobs import (
    Attention,
    Gan,
    Job,
    Reshaped,
    Unregistered,
    adam,
    classes,
    mlp,
    next_token,
    numbers,
    supervised,
    tokens,
)
from tests.unit.examination.made import bench_of, made_pass, uniform


def looked_at(job: Job) -> tuple[Workbench, Any, Any]:
    bench = bench_of(job)
    return bench, bench.batches[0], observe_passes(bench)[0]


def test_inputs_are_told_from_targets() -> None:
    _, batch, seen = looked_at(supervised(mlp(), classes()))
    assert list(seen.inputs) == ["[0]"]
    assert list(seen.targets) == ["[1]"]
    assert seen.num_samples == len(batch[0])
    assert [call.name for call in seen.calls] == ["cross_entropy"]
    assert seen.outputs[0].shape == (32, 4)
    assert len(seen.modules) == 1


@pytest.mark.parametrize(
    "change", [lambda x: x, lambda x: x.double(), lambda x: x.view(-1, 8), lambda x: x / 2.0, lambda x: x.clone()]
)
def test_also_where_the_loss_changes_the_input_first(change: Any) -> None:
    model = mlp().double()
    job = Job(model, adam(model), lambda b: F.cross_entropy(model(change(b[0]).double()), b[1]), classes())
    _, _, seen = looked_at(job)
    assert (list(seen.inputs), list(seen.targets)) == (["[0]"], ["[1]"])


def test_a_batch_of_one_tensor_is_an_input() -> None:
    model = Attention(causal=True)
    _, _, seen = looked_at(Job(model, adam(model), lambda ids: next_token(model, ids), tokens()))
    assert len(seen.inputs) == 1
    assert not seen.targets


def test_parts_of_a_model_that_a_loop_calls_itself() -> None:
    model = Gan()
    job = Job(model, adam(model), lambda x: model.judge(x).mean() + model.judge(-x).mean(), [x for x, _ in classes()])
    _, _, seen = looked_at(job)
    assert seen.modules == (model.judge, model.judge)


def test_a_batch_with_changed_inputs_leaves_the_first_alone() -> None:
    _, _, seen = looked_at(supervised(mlp(), classes()))
    batch = classes()[1]
    changed = seen.with_inputs(batch, lambda t: t * 2)
    assert torch.equal(changed[0], batch[0] * 2)
    assert changed[1] is batch[1]
    other = seen.with_targets(batch, lambda t: t + 1)
    assert other[0] is batch[0]
    assert torch.equal(other[1], batch[1] + 1)


class Blind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.zeros_like(x))


def test_whether_outputs_depend_on_inputs() -> None:
    for model, sees in ((mlp(), True), (Blind(), False)):
        bench, batch, seen = looked_at(supervised(model, classes()))
        for prepare in (None, restart):
            changed = depends_on_input(bench, batch, seen, prepare)
            assert changed is not None
            assert (changed > 1e-3) == sees


def test_whether_outputs_depend_on_neighbors() -> None:
    normed = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    for model, mixes in ((mlp(), False), (normed, False), (Reshaped(), True)):
        bench, batch, seen = looked_at(supervised(model, classes()))
        changed = depends_on_neighbors(bench, batch, seen)
        assert changed is not None
        assert (changed > 0.05) == mixes


def test_whether_a_target_belongs_to_its_sample() -> None:
    model = mlp(8, 1)
    bench, batch, seen = looked_at(supervised(model, numbers(), F.mse_loss))
    assert share_of_own_target(bench, batch, seen) == pytest.approx(1.0)
    reversed_ = supervised(model, numbers(), lambda out, y: F.mse_loss(out, y.flip(0)))
    bench, batch, seen = looked_at(reversed_)
    assert share_of_own_target(bench, batch, seen) == pytest.approx(0.0)


def test_whether_early_outputs_depend_on_later_inputs() -> None:
    for causal in (True, False):
        model = Attention(causal=causal)
        bench, batch, seen = looked_at(Job(model, adam(model), lambda ids, m=model: next_token(m, ids), tokens()))
        changed = depends_on_later(bench, batch, seen)
        assert changed is not None
        assert (changed > 1e-3) == (not causal)
    assert depends_on_later(*looked_at(supervised(mlp(), classes()))) is None


def test_the_spread_of_outputs() -> None:
    model = mlp()
    bench, batch, seen = looked_at(supervised(model, classes()))
    apart = spread_of_outputs(bench, batch, seen)
    assert apart is not None
    nn.init.zeros_(model[2].weight)
    assert spread_of_outputs(bench, batch, seen) == pytest.approx(0.0, abs=1e-5)
    fresh = spread_of_outputs(bench, batch, seen, restart)
    assert fresh is not None
    assert fresh > 1e-3
    assert spread_of_outputs(*looked_at(supervised(mlp(8, 1), numbers(), F.mse_loss))) is None


def test_what_cannot_be_told_of_one_sample() -> None:
    job = supervised(mlp(), [(x[:1], y[:1]) for x, y in classes()])
    bench, batch, seen = looked_at(job)
    assert depends_on_input(bench, batch, seen) is None
    assert depends_on_neighbors(bench, batch, seen) is None
    assert share_of_own_target(bench, batch, seen) is None
    assert spread_of_outputs(bench, batch, seen) is None


def policy(sign: float) -> Job:
    model = mlp()

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        states, actions, advantages = batch
        logs = model(states).log_softmax(1)
        entropy = -(logs.exp() * logs).sum(1).mean()
        return -(advantages * logs.gather(1, actions[:, None]).squeeze(1)).mean() + sign * 0.1 * entropy

    return Job(model, adam(model), loss, [(x, y, x[:, 0].clone()) for x, y in classes()])


def test_whether_a_policy_is_rewarded_for_certainty() -> None:
    assert rewards_certainty(*looked_at(policy(+1.0)))
    assert not rewards_certainty(*looked_at(policy(-1.0)))
    assert not rewards_certainty(*looked_at(policy(0.0)))
    assert not rewards_certainty(*looked_at(supervised(mlp(), classes())))


def test_parameters_that_cannot_learn() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    optimizer = SGD([{"params": [model[0].weight], "lr": 0.0}, {"params": [model[2].weight]}], lr=0.1)
    found = observe_parameters(bench_of(supervised(model, classes(), optimizer=optimizer)))
    assert found.frozen == ("0.bias",)
    assert found.rate_zero == ("0.weight",)
    assert found.not_in_optimizer == ("2.bias",)
    assert (found.no_gradient, found.outside_model, found.strangers, found.held) == ((), 0, 0, 2)
    assert found.trainable == found.total - 32
    assert not found.scheduled
    assert not found.half_precision
    lr_scheduler.StepLR(optimizer, 3)
    assert observe_parameters(bench_of(supervised(model, classes(), optimizer=optimizer))).scheduled


def test_parameters_that_nobody_holds() -> None:
    found = observe_parameters(bench_of(supervised(Unregistered(), classes())))
    assert found.outside_model == 4
    other = observe_parameters(bench_of(supervised(mlp(), classes(), optimizer=adam(mlp()))))
    assert (other.strangers, other.held) == (4, 4)
    assert len(other.not_in_optimizer) == 4


def test_parameters_without_a_gradient() -> None:
    model = nn.Sequential(mlp(8, 8), mlp(8, 4))
    job = Job(model, adam(model), lambda b: F.cross_entropy(model[1](model[0](b[0]).detach()), b[1]), classes())
    found = observe_parameters(bench_of(job))
    assert set(found.no_gradient) == {"0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"}
    assert reached(bench_of(job), restart)
    cut = Job(model, adam(model), lambda b: model(b[0]).argmax(1).float().mean(), classes())
    assert len(observe_parameters(bench_of(cut)).no_gradient) == 8
    assert not reached(bench_of(cut), restart)


def test_half_precision_is_seen() -> None:
    model = nn.Sequential(nn.Linear(8, 4).half())
    job = Job(model, adam(model), lambda b: F.cross_entropy(model(b[0].half()).float(), b[1]), classes())
    assert observe_parameters(bench_of(job)).half_precision == ("0.weight", "0.bias")


def test_the_next_rates_of_a_schedule() -> None:
    job = supervised(mlp(), classes(), optimizer=None)
    bench = bench_of(job)
    assert next_rates(bench, None) is None
    assert next_rates(bench, lr_scheduler.ReduceLROnPlateau(job.optimizer)) is None
    plan = lr_scheduler.StepLR(job.optimizer, step_size=2, gamma=0.1)
    rates = next_rates(bench, plan)
    assert rates is not None
    assert rates[:4] == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3])
    assert plan.last_epoch == 0
    assert job.optimizer.param_groups[0]["lr"] == 1e-2


def test_a_schedule_that_ends_is_read_to_its_end() -> None:
    job = supervised(mlp(), classes())
    rates = next_rates(bench_of(job), lr_scheduler.OneCycleLR(job.optimizer, max_lr=1.0, total_steps=20))
    assert rates is not None
    assert 20 <= len(rates) <= 21
    assert max(rates) == pytest.approx(1.0)


def test_leaves_of_a_graph() -> None:
    model = mlp()
    loss = model(uniform(4, 8)).sum()
    assert {id(leaf) for leaf in leaves_of(loss)} == {id(p) for p in model.parameters()}
    assert list(leaves_of(torch.zeros(()))) == []


def test_samples_come_first() -> None:
    assert by_sample(None, 4) is None
    assert by_sample(torch.zeros(()), 4) is None
    assert by_sample(uniform(3, 3), 4) is None
    first, second = by_sample(uniform(4, 2), 4), by_sample(uniform(2, 4, 5), 4)
    assert first is not None
    assert second is not None
    assert (first.shape, second.shape) == ((4, 2), (4, 2, 5))


def test_tensors_of_several_passes_are_joined() -> None:
    passes = [made_pass(x, y) for x, y in classes(number=3, inputs=4)]
    joined = over_batches(passes, lambda seen: seen.targets["[1]"])
    assert joined is not None
    assert joined.shape == (96,)
    assert over_batches(passes, lambda seen: None) is None
    uneven = [made_pass(uniform(4, 2), torch.zeros(4, dtype=torch.long)), *passes]
    assert over_batches(uneven, lambda seen: seen.inputs["[0]"]) is None


def _difference_of(step: float, dtype: torch.dtype = torch.float32) -> float | None:
    """Rounding of a loss that takes a second derivative by differences."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    before = copy.deepcopy(model.state_dict())

    def loss(x: Tensor) -> Tensor:
        curvature = (model(x + step) - 2.0 * model(x) + model(x - step)) / step**2
        return (curvature + model(x) - 1.0).square().mean()

    batches = [torch.rand(16, 1, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(6)]
    bench = Workbench(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), loss, batches, num_steps=10, max_grad_norm=None, seed=0
    )
    found = rounding_of(bench, batches[0])
    assert torch.get_default_dtype() is torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.dtype is dtype for p in model.parameters())
    return found


def test_digits_that_cancel_out_show_in_double_precision() -> None:
    tiny, usual = _difference_of(1e-4), _difference_of(0.1)
    assert tiny is not None
    assert tiny > 0.05
    assert usual is not None
    assert usual < 1e-3
    assert _difference_of(1e-4, torch.float64) is None


def test_a_loss_that_draws_numbers_is_not_compared_in_double_precision() -> None:
    model = nn.Linear(2, 1)
    batches = [torch.ones(8, 2)] * 6
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    bench = Workbench(
        model,
        optimizer,
        lambda x: (model(x) - torch.randn(8, 1)).square().mean(),
        batches,
        num_steps=10,
        max_grad_norm=None,
        seed=0,
    )
    assert rounding_of(bench, batches[0]) is None
