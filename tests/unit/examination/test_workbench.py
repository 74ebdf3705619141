"""Trials: what they measure, and what makes one count as learning."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim import SGD

from steadystep.examination.workbench import Trial, Variation, paired_standard_error
from tests.unit.examination.jobs import Job, adam, classes, mlp, supervised, untrained
from tests.unit.examination.made import bench_of, made_trial


@pytest.mark.parametrize(
    ("trial", "learns"),
    [
        (made_trial(2.0, 1.0), True),
        (made_trial(2.0, 2.0), False),
        (made_trial(1.0, 2.0), False),
        (made_trial(2.0, 1.97), False),  # less than two per cent
        (made_trial(-1.0, -2.0), True),
        (made_trial(2.0, math.nan), False),
        (made_trial(2.0, 1.0, losses=(2.0, math.inf)), False),
        (made_trial(2.0, 1.0, before=(1.0, 2.0, 3.0), after=(3.5, 1.2, 0.7)), False),  # within its own spread
        (made_trial(2.0, 1.0, before=(1.0, 2.0, 30.0), after=(0.9, 1.8, 27.0)), False),
        (made_trial(2.0, 1.0, before=(1.0, 2.0, 3.0), after=(0.5, 1.6, 2.4)), True),
    ],
)
def test_what_counts_as_learning(trial: Trial, learns: bool) -> None:
    assert trial.learns == learns


def test_numbers_of_a_trial() -> None:
    trial = made_trial(2.0, 0.5)
    assert (trial.start, trial.end, trial.gain, trial.finite) == (2.0, 0.5, 0.75, True)
    assert str(trial) == "made: 2 -> 0.5 in 2 updates"
    blown = made_trial(2.0, math.nan)
    assert (blown.end, blown.gain, blown.finite) == (math.inf, -math.inf, False)
    assert str(blown) == "made: 2 -> not finite in 2 updates"


def test_the_standard_error_is_that_of_pairs() -> None:
    assert paired_standard_error([1.0, 2.0, 30.0], [0.5, 1.5, 29.5]) == 0.0
    assert paired_standard_error([1.0], [0.0]) == 0.0
    assert paired_standard_error([1.0, 3.0], [0.0, 0.0]) == pytest.approx(1.0)


def test_held_batches_are_not_trained_on() -> None:
    bench = bench_of(untrained())
    assert len(bench.batches) + len(bench.held) == 9
    assert len(bench.held) == 3
    assert not any(held is batch for held in bench.held for batch in bench.batches)
    one = bench_of(untrained()._replace(batches=classes(number=1)))
    assert len(one.batches) == len(one.held) == 1


def test_a_trial_is_a_training_run() -> None:
    """The same as a plain loop over the training batches."""
    model = mlp()
    job = supervised(model, classes(), optimizer=SGD(model.parameters(), lr=0.1))
    bench = bench_of(job)
    trial = bench.trial("as-is", "as it is", Variation())
    losses = []
    for step in range(10):
        job.optimizer.zero_grad()
        loss = job.loss(bench.batches[step % len(bench.batches)])
        loss.backward()
        job.optimizer.step()
        losses.append(loss.item())
    assert trial.losses == tuple(losses)
    with torch.no_grad():
        assert trial.after == tuple(float(job.loss(batch)) for batch in bench.held)
    assert bench.num_updates == 10


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_multiple_of_the_rate(factor: float) -> None:
    def tried(lr: float, mult: float) -> Trial:
        torch.manual_seed(0)
        model = mlp()
        bench = bench_of(supervised(model, classes(), optimizer=SGD(model.parameters(), lr=lr)))
        return bench.trial("lr", "lr", Variation(lr_mult=mult))

    assert tried(0.01, factor) == tried(0.01 * factor, 1.0)


def test_a_warmup_is_tried_at_its_full_rate() -> None:
    job = untrained()
    torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: step / 100)
    assert job.optimizer.param_groups[0]["lr"] == 0.0
    assert bench_of(job).trial("as-is", "as it is", Variation()).learns


def test_averaged_batches_are_one_update() -> None:
    model = mlp()
    job = supervised(model, classes(), optimizer=SGD(model.parameters(), lr=0.1))
    bench = bench_of(job, num_steps=1)
    trial = bench.trial("large", "large", Variation(per_update=6))
    x, y = (torch.cat(parts) for parts in zip(*bench.batches, strict=True))
    F.cross_entropy(model(x), y).backward()
    job.optimizer.step()
    with torch.no_grad():
        assert trial.after == pytest.approx([float(job.loss(batch)) for batch in bench.held], rel=1e-5)
    assert bench.num_updates == 1


def test_clipping_can_be_left_out() -> None:
    model = mlp()
    job = supervised(model, classes(), optimizer=SGD(model.parameters(), lr=0.5))
    clipped = bench_of(job, max_grad_norm=1e-6).trial("a", "a", Variation())
    free = bench_of(job, max_grad_norm=1e-6).trial("a", "a", Variation(clip=False))
    assert not clipped.learns
    assert free.learns


def test_a_trial_that_blows_up_ends() -> None:
    model = nn.Linear(8, 4)
    job = supervised(model, classes(), lambda out, y: out.square().mean(), SGD(model.parameters(), lr=1e4))
    trial = bench_of(job, num_steps=200).trial("a", "a", Variation())
    assert len(trial.losses) < 200
    assert not trial.finite


def test_parameters_without_a_gradient_after_a_trial() -> None:
    model = nn.Sequential(mlp(8, 8), mlp(8, 4))
    optimizer = adam(model)
    job = untrained()._replace(
        model=model,
        optimizer=optimizer,
        loss=lambda b: F.cross_entropy(model[1](model[0](b[0]).detach()), b[1]),
    )
    still = bench_of(job).trial("a", "a", Variation()).still
    assert set(still) == {"0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"}


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_says_nothing_about_a_difference(odd: float) -> None:
    assert paired_standard_error((1.0, odd), (0.5, 0.5)) == math.inf


def test_a_loss_that_takes_gradients_itself_is_measured_without_them() -> None:
    model = mlp()

    def penalized(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs = batch[0].clone().requires_grad_()
        outputs = model(F.dropout(inputs, 0.5))
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return F.cross_entropy(outputs, batch[1]) + slope.square().mean()

    bench = bench_of(Job(model, adam(model), penalized, classes()))
    torch.manual_seed(3)
    expected = penalized(bench.every[0]).item()
    with torch.no_grad():
        torch.manual_seed(3)
        value = bench.loss(bench.every[0])
    assert value.item() == expected
    assert not value.requires_grad
