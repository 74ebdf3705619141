"""Kept batches, rows in another order, losses by mode, free outputs, the pace of a slow job: said and silent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from steadystep._utils import Attempts
from steadystep.examination import examine, one_pass
from steadystep.examination.checks import faults_of
from steadystep.examination.comparison import RepairComparison
from steadystep.examination.pairing import Answers, Modes, best_answers, loss_by_mode, rows_move
from steadystep.examination.parameters import restart
from steadystep.examination.passes import observe_passes
from tests.unit.examination.jobs import Job, adam, classes, mlp, numbers, supervised, trained
from tests.unit.examination.made import bench_of, made_observation, made_trial


def named(**changes: Any) -> list[str]:
    return [found.fault for found in faults_of(made_observation(**changes), Attempts())]


# Kept batches


def test_batches_end_where_the_data_begin_anew() -> None:
    first = classes(number=12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    again = [tuple(t.flip(0) for t in first[place]) for place in order]
    assert len(one_pass([*first, *again])) == 12
    assert len(one_pass(first)) == 12


def test_samples_that_come_again_in_part_are_other_batches() -> None:
    first = classes(number=12)
    half = [(torch.cat([a[0][:16], torch.randn(16, 8)]), a[1]) for a in first]
    assert len(one_pass([*first, *half])) == 24


@pytest.mark.parametrize("number", [1, 8])
def test_a_handful_of_batches_is_kept_as_it_is(number: int) -> None:
    few = classes(number=number)
    assert len(one_pass(few * 4)) == 4 * number


def test_batches_without_samples_are_kept() -> None:
    assert len(one_pass([torch.tensor(1.0)] * 12)) == 12
    assert len(one_pass([{"name": "a"}] * 12)) == 12


# Rows


class Packed(nn.Module):
    """Sorts its batch, as packing does."""

    def __init__(self, restores: bool) -> None:
        super().__init__()
        self.inner, self.restores = mlp(), restores

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        out: Tensor = self.inner(x[order])
        return out[order.argsort()] if self.restores else out


class Mixing(nn.Module):
    """Every sample gets something of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * x[:, :1].softmax(0)
        return out + out.roll(1, 0) * torch.arange(len(x)).unsqueeze(1)


class Noise(nn.Module):
    """What comes out has nothing to do with the rows that go in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.arange(len(x)).unsqueeze(1) * torch.ones(1, 4)


@pytest.mark.parametrize(
    ("model", "moves"),
    [(mlp(), False), (Packed(True), False), (Packed(False), True), (Mixing(), None), (Noise(), None)],
)
def test_rows_in_another_order(model: nn.Module, moves: bool | None) -> None:
    bench = bench_of(supervised(model, classes()))
    assert rows_move(bench, bench.batches[0], observe_passes(bench)[0]) is moves


def test_rows_in_another_order_are_named_before_batch_dependence() -> None:
    assert named(moves=True, on_neighbors=1.0) == ["labels-shuffled", "batch-dependence"]
    assert named(moves=False, on_neighbors=1.0) == ["batch-dependence"]


# Modes


def normed(momentum: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, momentum=momentum), nn.ReLU(), nn.Linear(32, 4))


@pytest.mark.parametrize(("momentum", "said"), [(1e-5, True), (0.1, False)])
def test_statistics_that_do_not_follow(momentum: float, said: bool) -> None:
    torch.manual_seed(0)
    model = normed(momentum)
    batches = [(30.0 * x + 50.0, y) for x, y in classes()]
    job = trained(supervised(model, batches), steps=300)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    done = examine(*job, num_steps=10, num_updates=300)
    assert (done.causes[0].fault == "batch-dependence") is said
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert [m.momentum for m in model if isinstance(m, nn.BatchNorm1d)] == [momentum]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((0.5, 1.0, 0.6), True),
        ((0.59, 0.9, 0.79), True),
        ((0.6, 1.0, 0.6), False),
        ((0.5, 0.89, 0.6), False),
        ((0.5, 1.0, 0.75), False),
        ((0.5, float("nan"), 0.6), True),
    ],
)
def test_when_modes_differ(losses: tuple[float, float, float], said: bool) -> None:
    training, evaluating, renewed = losses
    assert Modes(training=training, evaluating=evaluating, renewed=renewed).differ(1.0) is said


def test_no_modes_without_running_statistics() -> None:
    for model in (mlp(), normed(0.1).eval(), nn.Sequential(nn.BatchNorm1d(8, track_running_stats=False), mlp())):
        bench = bench_of(supervised(model, classes()))
        assert loss_by_mode(bench, observe_passes(bench)[0]) is None


# Free outputs


def gaussian(with_logarithm: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        mean, raw = out.unbind(1)
        each = (y - mean).square() * (-2 * raw).exp()
        return (each + 2 * raw if with_logarithm else each).mean()

    return loss


def fitted(job: Job) -> Answers | None:
    bench = bench_of(job)
    return best_answers(bench, bench.batches[0], observe_passes(bench)[0])


@pytest.mark.parametrize(("with_logarithm", "said"), [(False, True), (True, False)])
def test_a_likelihood_without_its_logarithm(with_logarithm: bool, said: bool) -> None:
    torch.manual_seed(0)
    found = fitted(supervised(mlp(8, 2), numbers(column=False), gaussian(with_logarithm)))
    assert found is not None
    assert found.ignore_targets is said


@pytest.mark.parametrize(
    ("job", "error"),
    [
        (lambda: supervised(mlp(), classes()), "cross-entropy"),
        (lambda: supervised(mlp(8, 1), numbers(), F.mse_loss), "squares"),
        (lambda: supervised(mlp(8, 1), numbers(), F.l1_loss), "distances"),
        (lambda: supervised(mlp(8, 1), numbers(), lambda o, y: 1 - (-(o - y).square()).exp().mean()), "bounded"),
        (lambda: supervised(mlp(8, 1), numbers(), lambda o, y: o.square().mean() + 0 * y.sum()), "not used"),
    ],
)
def test_losses_that_ask_for_their_targets(job: Callable[[], Job], error: str) -> None:
    torch.manual_seed(0)
    found = fitted(job())
    assert found is not None, error
    assert not found.ignore_targets, error


def test_no_free_outputs_without_targets() -> None:
    model = mlp(8, 8)
    xs = [x for x, _ in classes()]
    assert fitted(Job(model, adam(model), lambda x: F.mse_loss(model(x), x), xs)) is None


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((1.0, 2.0, 0.1, 0.15), True),
        ((1.0, 1.005, 0.1, 0.15), False),
        ((1.0, 2.0, 0.6, 0.6), False),
        ((1.0, 2.0, 0.1, 0.33), False),
        ((1.0, 2.0, float("-inf"), 0.2), False),
    ],
)
def test_when_a_loss_ignores_its_targets(losses: tuple[float, ...], said: bool) -> None:
    first, turned, best, best_turned = losses
    assert Answers(first=first, turned=turned, best=best, best_turned=best_turned).ignore_targets is said


# New weights and pace


def test_bare_matrices_are_drawn_again_too() -> None:
    torch.manual_seed(0)
    model = nn.ParameterDict({"w": 3.0 + 0.5 * torch.randn(40, 40), "b": torch.ones(40), "z": torch.zeros(4, 4)})
    before = {name: p.detach().clone() for name, p in model.items()}
    restart(model, adam(model))
    assert not torch.equal(model["w"], before["w"])
    assert float(model["w"].detach().std()) == pytest.approx(0.5, rel=0.1)
    assert float(model["w"].detach().mean()) == pytest.approx(3.0, rel=0.1)
    assert torch.equal(model["b"], before["b"])
    assert torch.equal(model["z"], before["z"])


def test_frozen_matrices_stay_as_they_are() -> None:
    model = nn.ParameterDict({"w": torch.randn(4, 4), "v": torch.randn(4, 4)})
    model["w"].requires_grad_(False)
    before = model["w"].clone()
    restart(model, adam(nn.ParameterDict({"v": model["v"]})))
    assert torch.equal(model["w"], before)


@pytest.mark.parametrize(
    ("fall", "gap", "updated", "said"),
    [
        (0.01, 0.24, 100, True),  # 0.01 in 40 updates is 0.25 in 1000
        (0.01, 0.26, 100, False),
        (0.001, 0.4, 100, False),
        (0.001, 0.4, 2000, True),
        (-0.01, 0.1, 1000, False),
    ],
)
def test_a_job_that_will_be_there_by_itself(fall: float, gap: float, updated: int, said: bool) -> None:
    bench = bench_of(supervised(mlp(), classes()), updated=updated)
    base = made_trial(1.0, 1.0 - fall, losses=(1.0,) * 40)
    comparison = RepairComparison(bench, lambda *_, **__: base, made_observation(), base, base)
    assert comparison._is_on_its_way(gap) is said
