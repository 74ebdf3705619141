"""`Guard.examine`: what it experiments with by default, what it refuses, and one story with what the run showed."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam

from steadystep import Guard, MisuseError, UnsupportedError, watch
from tests.unit.examination.jobs import Job, classes, mlp, supervised, untrained


def guarded(job: Job, steps: int = 20, **options: object) -> Guard:
    guard = Guard(job.model, job.optimizer, **options)  # type: ignore[arg-type]
    for step in range(steps):
        guard.step(job.loss, batch=job.batches[step % len(job.batches)])
    return guard


def test_the_loss_and_the_batches_of_the_run_are_the_default() -> None:
    job = untrained()
    guard = guarded(job)
    done = guard.examine(num_steps=12)
    assert [found.cause for found in done.causes] == ["healthy"]
    assert guard.updates == 20


def test_others_can_be_given() -> None:
    job, calls = untrained(), []
    other = [(x + 0.0, y) for x, y in classes(number=5)]

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(id(batch))
        return functional.cross_entropy(job.model(batch[0]), torch.zeros_like(batch[1]))

    done = guarded(job).examine(other, loss=loss, num_steps=12)
    assert done.causes[0].fault == "constant-targets"
    assert {id(batch) for batch in other} <= set(calls)


def test_options_are_passed_on() -> None:
    lines: list[str] = []
    done = guarded(untrained()).examine(num_steps=11, progress=lines.append)
    assert {len(trial.losses) for trial in done.trials} <= {11, 5 * 11}
    assert len(done.trials[0].losses) == 11
    assert lines


def test_the_clipping_of_the_guard_is_part_of_the_run() -> None:
    model = mlp()
    job = supervised(model, classes(), optimizer=SGD(model.parameters(), lr=0.3))
    guard = guarded(job, config={"training": {"max_grad_norm": 1e-5}})
    assert guard.examine(num_steps=24).causes[0].cause == "clipping-too-tight"
    assert guard.examine(num_steps=24, max_grad_norm=None).causes[0].cause == "healthy"


def test_without_a_loss_there_is_a_message() -> None:
    job = untrained()
    with Guard(job.model, job.optimizer) as guard:
        with pytest.raises(MisuseError, match="no loss: pass loss="):
            guard.examine()
        with pytest.raises(MisuseError, match="no loss: pass loss="):
            guard.examine(job.batches)
        with pytest.raises(MisuseError, match="no batches: pass your loader"):
            guard.examine(loss=job.loss)
        with pytest.raises(MisuseError, match="at least one batch"):
            guard.examine([], loss=job.loss)


def test_closures_without_a_batch_are_not_remembered() -> None:
    job = untrained()
    with Guard(job.model, job.optimizer) as guard:
        guard.step(lambda: job.loss(job.batches[0]))
        with pytest.raises(MisuseError, match="no loss"):
            guard.examine()


def test_several_optimizers_are_refused() -> None:
    job = untrained()
    first, last = job.model[0], job.model[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    with (
        Guard(job.model, [Adam(first.parameters()), SGD(last.parameters(), lr=0.1)]) as guard,
        pytest.raises(UnsupportedError, match="one optimizer"),
    ):
        guard.examine(job.batches, loss=job.loss)


def test_inside_a_step_it_is_refused() -> None:
    job = untrained()
    guard = Guard(job.model, job.optimizer)

    def closure(batch: tuple[Tensor, Tensor]) -> Tensor:
        guard.examine(job.batches, loss=job.loss)
        return job.loss(batch)

    with pytest.raises(MisuseError, match=r"examine\(\)"):
        guard.step(closure, batch=job.batches[0])


def test_a_closed_guard_can_still_be_asked() -> None:
    job = untrained()
    guard = guarded(job)
    guard.close()
    assert guard.examine(job.batches, loss=job.loss, num_steps=12).causes[0].cause == "healthy"


def test_what_the_run_showed_is_part_of_the_story() -> None:
    """A loop that never clears gradients: trials take their own steps and do not see it."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.05)
    watcher = watch(model, optimizer)
    job = supervised(model, classes(number=60))
    for batch in job.batches:
        job.loss(batch).backward()
        optimizer.step()
    passive = [found.cause for found in watcher.guard.diagnose()]
    assert passive[0] == "missing-zero-grad"
    done = watcher.guard.examine(job.batches, loss=job.loss, num_steps=12)
    assert done.causes[0].cause == "missing-zero-grad"


def test_the_passes_of_an_examination_are_not_the_runs() -> None:
    """The guard counts no attempt and logs no loss; its diagnosis is the examination's until the next step."""
    job = untrained()
    guard = guarded(job)
    before, seen = (guard.attempts, guard.updates, guard.state_dict()), guard.diagnose()
    examined = guard.examine(num_steps=12)
    assert (guard.attempts, guard.updates, guard.state_dict()) == before
    assert guard.diagnose() == examined.causes != seen


@pytest.mark.parametrize("precision", ["bf16"])
def test_the_precision_of_the_guard_is_used(precision: str) -> None:
    job, dtypes = untrained(), set()
    last = job.model[2]
    assert isinstance(last, nn.Linear)
    guard = guarded(job, config={"training": {"mixed_precision": precision}})
    now: list[str] = []
    handle = last.register_forward_hook(lambda module, args, output: dtypes.add((now[-1], output.dtype)))
    guard.examine(num_steps=12, progress=now.append)
    handle.remove()
    # one pass in double precision says how many digits of the loss are right
    assert {dtype for trial, dtype in dtypes if "float32" not in trial} - {torch.float64} == {torch.bfloat16}
