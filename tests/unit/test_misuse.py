"""One bad call must not break a run: refused at once, with a remedy, and it ends with the bits it would have had."""

import random
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import steadystep

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "attacks"))
import bad_calls
import misuse
from stage import STEPS

CASES = {(case.group, case.name): case for case in bad_calls.cases(frameworks=False)}
# What was seen to break a guard, or to be accepted; the others: `python benchmarks/attacks/misuse.py`.
SEEN = [
    ("Guard", "Guard(a model on meta)"),
    ("Guard", "Guard(optimizer with lr=None)"),
    ("Guard", "Guard(optimizer with lr='0.1')"),
    ("Guard", "detectors=[object()]"),
    ("Guard", "sinks='wandb'"),
    ("Guard", "run_dir=3"),
    ("Guard.step", "step(None)"),
    ("Guard.step", "step(a loss on meta)"),
    ("Guard.step", "step(the model)"),
    ("Guard.step", "metrics={3: 1.0}"),
    ("Guard.step", "metrics={'a': on meta}"),
    ("Guard.step", "metrics={'a': 10**400}"),
    ("Guard.step", "groups without parameters"),
    ("Guard.step in a group", "groups without parameters"),
    ("Guard.step", "weight='x'"),
    ("Guard.step", "lr=None at a step"),
    ("Guard.step", "a closure that raises"),
    ("Guard.step", "a closure that calls optimizer.step itself"),
    ("Guard.step", "a closure that calls backward itself, twice allowed"),
    ("Guard.step", "a closure that calls guard.close"),
    ("Guard.step", "a closure with an argument, no batch="),
    ("Guard.step in a group", "step(None)"),
    ("Guard.step in a group", "weight=nan"),
    ("Guard.step in a group", "metrics={'a': 'x'}"),
    ("Guard.step in a group", "lr=None at a step"),
    ("Guard.step in a group", "a closure that raises"),
    ("Guard.step in a group", "a closure that calls optimizer.step itself"),
    ("validate", "validate('x')"),
    ("validate", "validate(1.0, accuracy='x')"),
    ("keep", "keep('a', Lock())"),
    ("keep", "keep('a', a state_dict that raises)"),
    ("keep", "keep('a', a lock in its state), with checkpoints"),
    ("load_state_dict", "load_state_dict(None)"),
    ("inspect, commit", "inspect(an int)"),
    ("copies", "pickle.dumps(guard)"),
    ("copies", "copy.deepcopy(guard)"),
    ("batches", "batches(None)"),
    ("clip", "clip_global_norm_(max_norm='x')"),
    ("watch", "watch(scaler=3)"),
    ("watch", "watch(schedulers=[object()])"),
    ("watch", "watcher.loss(on meta)"),
    ("watch", "watcher.guard.step(loss)"),
    ("callbacks", "tell= raises once"),
]


def attacked(case: misuse.Case, seed: int) -> str:
    """What was wrong, if anything was."""
    at = random.Random(seed).randrange(1, STEPS) * case.accumulate + case.accumulate - 1
    with warnings.catch_warnings(action="ignore"):
        wrong, digest = misuse.attack(case, seed, at)
        return wrong or ("" if digest == misuse.unharmed(seed, case.accumulate, case.watched) else "other bits")


@pytest.mark.parametrize("key", SEEN, ids=": ".join)
def test_a_bad_call_is_refused_and_the_run_goes_on(key: tuple[str, str]) -> None:
    assert attacked(CASES[key], 5) == ""


@pytest.mark.slow
@pytest.mark.parametrize("key", CASES, ids=": ".join)
def test_every_bad_call(key: tuple[str, str]) -> None:
    assert attacked(CASES[key], 7) == ""


def test_the_attack_can_fail() -> None:
    """A call that changes the run, and one that is accepted, are seen."""

    def drawn(stage: misuse.Stage) -> None:
        torch.rand(1)
        raise steadystep.MisuseError("use something else")

    assert attacked(bad_calls.Case("", "", drawn), 5) == "other bits"
    assert "accepted" in attacked(bad_calls.Case("", "", lambda stage: 3), 5)
    assert "RuntimeError" in attacked(bad_calls.Case("", "", lambda stage: torch.ones(2).reshape(3)), 5)


def test_a_scheduler_may_wrap_the_step_and_a_closure_may_not_call_it() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)  # puts its own `step` on the optimizer
    guard, x = steadystep.Guard(model, optimizer), torch.ones(4, 2)
    wrapped = optimizer.step
    with pytest.raises(steadystep.MisuseError, match=r"called optimizer\.step:"):
        guard.step(lambda: (optimizer.step(), model(x).mean())[1])
    assert optimizer.step is wrapped
    assert guard.step(lambda: model(x).mean()).stepped
    scheduler.step()


def test_clearing_gradients_in_a_closure_is_harmless_alone_and_refused_in_a_group() -> None:
    for size in (1, 2):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = steadystep.Guard(model, optimizer, config={"training": {"gradient_accumulation_steps": size}})
        x = torch.ones(4, 2)
        guard.step(lambda model=model, x=x: model(x).mean())

        def closure(optimizer=optimizer, model=model, x=x):
            optimizer.zero_grad()
            return model(x).mean()

        if size == 1:
            assert guard.step(closure).stepped
        else:
            with pytest.raises(steadystep.MisuseError, match="zero_grad"):
                guard.step(closure)
