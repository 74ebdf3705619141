"""Examine names each clear fault first, with a repair that it has tried, and calls no healthy job faulty."""

import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from steadystep import ConfigError, MisuseError, examine
from steadystep.diagnosis import Cause
from steadystep.diagnosis.causes import Fault
from tests.unit.examination.jobs import (
    FAULTS,
    HEALTHY,
    Gan,
    Job,
    adam,
    classes,
    dropout_of_95_percent,
    mlp,
    rate_too_high,
    rate_too_low,
    supervised,
    untrained,
)

STEPS = 24


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_first(name: str) -> None:
    make, cause, fault = FAULTS[name]
    found = examine(*make(), num_steps=STEPS).causes[0]
    assert (found.cause, found.fault) == (cause, fault), found
    assert found.evidence
    assert found.advice
    assert found.cause in set(Cause)
    assert not found.fault or found.fault in set(Fault)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_job_is_healthy(name: str) -> None:
    (found,) = examine(*HEALTHY[name](), num_steps=STEPS).causes
    assert found.cause == "healthy", found
    assert found.evidence
    assert not found.fault


@pytest.mark.parametrize("seed", [1])
def test_seeds_do_not_decide(seed: int) -> None:
    torch.manual_seed(seed)
    assert examine(*untrained(), num_steps=STEPS, seed=seed).causes[0].cause == "healthy"
    assert examine(*rate_too_high(), num_steps=STEPS, seed=seed).causes[0].cause == "learning-rate-too-high"


def test_ignored_labels_are_named_where_their_mean_is_nan() -> None:
    job = supervised(mlp(), [(x, torch.full_like(y, -100)) for x, y in classes()])
    assert "all-ignored-targets" in [found.fault for found in examine(*job, num_steps=STEPS).causes]


def test_a_gan_whose_generator_is_called_first_is_healthy() -> None:
    model = Gan()

    def loss(batch: torch.Tensor) -> torch.Tensor:
        made = model.make(torch.randn(len(batch), 4))
        real, fake = model.judge(batch), model.judge(made.detach())
        fooled = F.binary_cross_entropy_with_logits(model.judge(made), torch.ones(len(made), 1))
        told = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        return fooled + told + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))

    done = examine(model, adam(model, lr=2e-4), loss, [x for x, _ in classes()], num_steps=STEPS)
    assert done.causes[0].cause == "healthy"


def test_the_repair_was_tried_and_its_numbers_are_the_evidence() -> None:
    done = examine(*rate_too_low(), num_steps=STEPS)
    found = done.causes[0]
    assert "tried" in found.advice
    helped = [trial for trial in done.trials if trial.name.startswith("lr*") and str(trial) in found.evidence]
    assert len(helped) == 1
    assert helped[0].learns
    assert helped[0].end < done.trials[0].end


def test_a_schedule_that_ends_at_once_is_named() -> None:
    job = untrained()
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=1, gamma=0.5)
    assert examine(*job, scheduler=schedule, num_steps=STEPS).causes[0].cause == "schedule-error"


def test_a_slow_warmup_is_no_fault() -> None:
    job = untrained()
    schedule = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: min(step / 500, 1.0))
    assert examine(*job, scheduler=schedule, num_steps=STEPS).causes[0].cause == "healthy"


def test_clipping_to_nothing_is_named() -> None:
    model = mlp()
    job = supervised(model, classes(), optimizer=torch.optim.SGD(model.parameters(), lr=0.3))
    assert examine(*job, num_steps=STEPS).causes[0].cause == "healthy"
    assert examine(*job, num_steps=STEPS, max_grad_norm=1e-5).causes[0].cause == "clipping-too-tight"


def test_trials_take_the_steps_they_are_given() -> None:
    done = examine(*dropout_of_95_percent(), num_steps=12)
    assert done.num_updates == sum(len(trial.losses) for trial in done.trials)
    assert {len(trial.losses) for trial in done.trials} <= {12, 60}
    assert done.trials[0].name == "as-is"
    assert done.seconds > 0


def test_time_limits_the_number_of_trials() -> None:
    usual = examine(*rate_too_low(), num_steps=12)
    short = examine(*rate_too_low(), num_steps=12, max_seconds=0.0)
    assert len(short.trials) < len(usual.trials)
    assert short.causes


def test_progress_is_told_before_each_trial() -> None:
    lines: list[str] = []
    done = examine(*rate_too_low(), num_steps=12, progress=lines.append)
    assert [trial.what for trial in done.trials] == lines[-len(done.trials) :]
    assert len(lines) > len(done.trials)


def test_the_same_seed_gives_the_same_trials() -> None:
    job = dropout_of_95_percent()
    one = examine(*job, num_steps=12)
    torch.manual_seed(1234)
    other = examine(*job, num_steps=12)
    assert one.trials == other.trials
    assert one.causes == other.causes
    assert examine(*job, num_steps=12, seed=5).trials != one.trials


def test_it_prints_and_goes_to_json() -> None:
    done = examine(*rate_too_high(), num_steps=STEPS)
    text = str(done)
    assert text.startswith("cause       learning-rate-too-high\nevidence    as it is")
    assert "\ntry         divide the learning rate by" in text
    assert text.endswith("everything is put back")
    assert f"trials: {len(done.trials)}, updates: {done.num_updates}" in text
    told = json.loads(json.dumps(done.to_json()))
    assert [trial["name"] for trial in told["trials"]] == [trial.name for trial in done.trials]
    assert told["num_updates"] == done.num_updates


def test_the_causes_are_plain_values() -> None:
    make, cause, fault = FAULTS["constant targets"]
    (found,) = json.loads(json.dumps(examine(*make(), num_steps=STEPS).to_json()))["causes"]
    assert (found["cause"], found["fault"]) == (cause, fault)


def test_a_loss_that_is_not_finite_is_printed_as_such() -> None:
    make, *_ = FAULTS["loss not finite"]
    done = examine(*make(), num_steps=STEPS)
    assert not math.isfinite(done.trials[0].end)
    assert "not finite" in str(done)


def test_a_loss_that_is_not_finite_is_valid_json() -> None:
    make, *_ = FAULTS["loss not finite"]
    assert json.dumps(examine(*make(), num_steps=STEPS).to_json(), allow_nan=False)


@pytest.mark.parametrize("options", [{"num_steps": 9}, {"num_batches": 0}])
def test_too_little_to_go_by_is_a_config_error(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 10 steps and 1 batch"):
        examine(*untrained(), **options)


def test_no_batches_is_a_misuse() -> None:
    model = mlp()
    with pytest.raises(MisuseError, match="at least one batch"):
        examine(model, adam(model), lambda batch: model(batch).sum(), [])


def batches_of(kind: str) -> Job:
    """The same job with batches of different containers."""
    model = mlp()
    make: dict[str, tuple[Callable[..., object], Callable[..., torch.Tensor]]] = {
        "dict": (lambda x, y: {"x": x, "y": y}, lambda b: F.cross_entropy(model(b["x"]), b["y"])),
        "list": (lambda x, y: [x, y], lambda b: F.cross_entropy(model(b[0]), b[1])),
        "nested": (
            lambda x, y: ({"x": x}, [y, "a name"]),
            lambda b: F.cross_entropy(model(b[0]["x"]), b[1][0]),
        ),
        "one tensor": (lambda x, y: x, lambda x: (model(x) - x[:, :4]).square().mean()),
    }
    build, loss = make[kind]
    return Job(model, adam(model), loss, [build(x, y) for x, y in classes()])


@pytest.mark.parametrize("kind", ["dict", "list", "nested", "one tensor"])
def test_batches_of_any_form(kind: str) -> None:
    assert examine(*batches_of(kind), num_steps=STEPS).causes[0].cause == "healthy"


def test_a_generator_of_batches_is_read_no_farther_than_needed() -> None:
    model, given = mlp(), []

    def endless():
        data = classes(number=40)
        while True:
            for batch in data:
                given.append(batch)
                yield batch

    done = examine(model, adam(model), lambda b: F.cross_entropy(model(b[0]), b[1]), endless(), num_steps=STEPS)
    assert done.causes[0].cause == "healthy"
    assert len(given) < 100


def test_sorted_data_is_not_called_constant() -> None:
    data = classes(number=40)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    order = y.argsort()
    sorted_batches = list(zip(x[order].split(32), y[order].split(32), strict=True))
    model = mlp()
    done = examine(
        model,
        adam(model),
        lambda b: F.cross_entropy(model(b[0]), b[1]),
        sorted_batches,
        num_steps=STEPS,
        num_batches=8,
    )
    assert done.causes[0].fault == "unshuffled-data"


def test_a_dead_network_is_told_from_a_poor_rate() -> None:
    model = mlp()
    nn.init.constant_(model[0].bias, -100.0)  # every unit is off
    done = examine(*supervised(model, classes()), num_steps=STEPS)
    assert done.causes[0].cause == "dead-units"


def test_a_schedule_near_its_end() -> None:
    job = untrained()
    schedule = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, max_lr=0.02, total_steps=60)
    for _ in range(45):
        job.optimizer.step()
        schedule.step()
    assert examine(*job, scheduler=schedule, num_steps=STEPS).causes[0].cause == "healthy"


class Sample:
    """A batch that is neither a container nor a dataclass."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


def test_batches_that_are_objects() -> None:
    model = mlp()
    batches = [Sample(x, y) for x, y in classes()]
    done = examine(model, adam(model), lambda b: F.cross_entropy(model(b.x), b.y), batches, num_steps=STEPS)
    assert done.causes[0].cause == "healthy"


@pytest.mark.parametrize("change", [lambda loss: loss.item(), lambda loss: None, lambda loss: loss.expand(3)])
def test_a_loss_that_is_no_loss_is_a_misuse(change: Callable[[torch.Tensor], object]) -> None:
    job = untrained()
    with pytest.raises(MisuseError):
        examine(job.model, job.optimizer, lambda batch: change(job.loss(batch)), job.batches)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["model", "optimizer"])
def test_a_wrong_argument_is_a_misuse(wrong: str) -> None:
    job = untrained()._asdict()
    with pytest.raises(MisuseError, match=wrong):
        examine(**{**job, wrong: [job[wrong]]})


def test_a_detached_loss_is_named() -> None:
    job = untrained()
    done = examine(job.model, job.optimizer, lambda batch: job.loss(batch).detach(), job.batches, num_steps=STEPS)
    assert done.causes[0].cause == "zero-gradient"


def test_gradients_may_be_off_outside() -> None:
    with torch.no_grad():
        assert examine(*untrained(), num_steps=STEPS).causes[0].cause == "healthy"


def test_arrays_as_batches() -> None:
    model = mlp()
    batches = [(x.numpy(), y.numpy()) for x, y in classes()]
    done = examine(
        model,
        adam(model),
        lambda b: F.cross_entropy(model(torch.from_numpy(b[0])), torch.from_numpy(b[1])),
        batches,
        num_steps=STEPS,
    )
    assert done.causes[0].cause == "healthy"
