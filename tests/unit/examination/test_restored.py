"""After an examination everything is as it was, to the bit, and a run goes on as if there had been none."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, TensorDataset

import steadystep
from steadystep import Guard, SteadystepError, examine
from tests.unit.examination.jobs import classes

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2), weight_decay=0.1, capturable=False),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=60),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=50),
    "warmup": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 20, 1.0)),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),
    "chained": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=5), lr_scheduler.StepLR(optimizer, 3)],
        milestones=[5],
    ),
}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def loss_of(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], schedule: Any = None) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model)(batch)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step(*([loss.detach()] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))


def state_of(*things: Any) -> Any:
    return copy.deepcopy([thing.state_dict() for thing in things])


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, in the same order."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (callable(one) and callable(other))


def test_same_sees_a_difference() -> None:
    model = network()
    before = state_of(model)
    assert same(before, state_of(model))
    model[1].num_batches_tracked.add_(1)
    assert not same(before, state_of(model))


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer, *others: Any) -> Iterator[None]:
    """Values and objects: weights, buffers, gradients, modes, flags, moments, groups, other states, random numbers."""
    values = state_of(model, optimizer, *others)
    gradients = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    tensors = [*model.parameters(), *model.buffers()]
    places = [t.data_ptr() for t in tensors]
    state, groups, group_list = dict(optimizer.state), list(optimizer.param_groups), optimizer.param_groups
    moments = [dict(kept) for kept in state.values()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    drawn = (torch.get_rng_state(), random.getstate(), repr(np.random.get_state()))
    try:
        yield
    finally:
        assert torch.equal(torch.get_rng_state(), drawn[0])
        assert (random.getstate(), repr(np.random.get_state())) == drawn[1:]
        assert same(values, state_of(model, optimizer, *others))
        for p, (gradient, value) in zip(model.parameters(), gradients, strict=True):
            assert p.grad is gradient
            assert gradient is None or (value is not None and torch.equal(gradient, value))
        assert [module.training for module in model.modules()] == modes
        assert [p.requires_grad for p in model.parameters()] == flags
        assert all(now is then for now, then in zip([*model.parameters(), *model.buffers()], tensors, strict=True))
        assert [t.data_ptr() for t in tensors] == places
        assert list(optimizer.state) == list(state)
        for now, then, kept in zip(optimizer.state.values(), state.values(), moments, strict=True):
            assert now is then
            assert all(now[key] is kept[key] for key in kept)
        assert optimizer.param_groups is group_list
        assert all(now is then for now, then in zip(group_list, groups, strict=True))
        assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize(("name", "trained"), [("SGD", 0), *((name, 5) for name in OPTIMIZERS)])
def test_with_every_optimizer(name: str, trained: int) -> None:
    batches, model = classes(), network()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, batches[:trained])
    with unchanged(model, optimizer):
        examine(model, optimizer, loss_of(model), batches, num_steps=10)


def test_where_every_repair_is_tried() -> None:
    """Labels at random, decay, dropout, clipping, evaluation mode, a frozen layer and one outside of the optimizer."""
    model = network()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model[0].weight, *model[1].parameters(), model[4].weight], lr=1e-5, weight_decay=1.0)
    batches = [(9.0 * x + 7.0, torch.randint(0, 4, y.shape)) for x, y in classes()]
    train(model, optimizer, batches[:2])
    model[1].eval()
    with unchanged(model, optimizer):
        done = examine(model, optimizer, loss_of(model), batches, num_steps=10, max_grad_norm=0.01)
    tried = {trial.name for trial in done.trials}
    assert {"all-parameters", "no-clipping", "no-decay", "no-dropout", "scaled-inputs", "lr/10", "lr*10"} <= tried
    with unchanged(model.eval(), optimizer):
        done = examine(model, optimizer, loss_of(model), batches, num_steps=10)
    assert "train-mode" in {trial.name for trial in done.trials}


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_every_schedule(name: str) -> None:
    batches, model = classes(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = SCHEDULES[name](optimizer)
    train(model, optimizer, batches[:4], schedule)
    with unchanged(model, optimizer, schedule):
        examine(model, optimizer, loss_of(model), batches, num_steps=10, scheduler=schedule)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    twin_schedule = SCHEDULES[name](twin_optimizer)
    twin_schedule.load_state_dict(copy.deepcopy(schedule.state_dict()))
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other, plan in ((model, optimizer, schedule), (twin, twin_optimizer, twin_schedule)):
        torch.manual_seed(1)
        train(one, other, batches, plan)
    assert same(state_of(model), state_of(twin))


def with_average() -> tuple[nn.Module, torch.optim.Optimizer, swa_utils.AveragedModel]:
    model = network()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, classes()[:3])
    average.update_parameters(model)
    return model, optimizer, average


def test_copies_of_the_weights_stay() -> None:
    model, optimizer, average = with_average()
    with unchanged(model, optimizer, average):
        examine(model, optimizer, loss_of(model), classes(), num_steps=10)


def test_an_average_that_a_hook_updates_stays() -> None:
    model, optimizer, average = with_average()
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    with unchanged(model, optimizer, average):
        examine(model, optimizer, loss_of(model), classes(), num_steps=10)


def loader(generator: torch.Generator | None) -> DataLoader[Any]:
    x, y = (torch.cat(parts) for parts in zip(*classes(), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, generator=generator, drop_last=True)


@pytest.mark.parametrize("own_generator", [True, False])
def test_a_loader_shuffles_as_if_it_had_not_been_read(own_generator: bool) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    orders = []
    for examined in (False, True):
        torch.manual_seed(4)
        batches = loader(torch.Generator().manual_seed(3) if own_generator else None)
        if examined:
            with unchanged(model, optimizer):
                examine(model, optimizer, loss_of(model), batches, num_steps=10)
        orders.append(list(batches))
    assert same(*orders)


class StoppedError(Exception):
    """Raised by a loss."""


@pytest.mark.parametrize("error", [StoppedError, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("call", [1, 60])
def test_when_the_loss_raises(error: type[BaseException], call: int) -> None:
    batches, model = classes(), network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, batches[:3])
    calls, plain = [0], loss_of(model)

    def raising(batch: Any) -> Tensor:
        calls[0] += 1
        loss = plain(batch)
        if calls[0] >= call:
            raise error("no more")
        return loss

    with unchanged(model, optimizer), pytest.raises(error, match="no more"):
        examine(model, optimizer, raising, batches, num_steps=10)


def test_when_the_user_interrupts_between_trials() -> None:
    batches, model = classes(), network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def progress(line: str) -> None:
        if "new weights" in line:
            raise KeyboardInterrupt

    with unchanged(model, optimizer), pytest.raises(KeyboardInterrupt):
        examine(model, optimizer, loss_of(model), batches, num_steps=10, progress=progress)


def test_an_optimizer_that_needs_a_closure_is_a_clear_error() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with unchanged(model, optimizer), pytest.raises(SteadystepError, match=r"LBFGS|closure"):
        examine(model, optimizer, loss_of(model), classes(), num_steps=10)


def test_random_numbers_of_the_loss_stay_in_their_places() -> None:
    batches, model = classes(), network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def noisy(batch: Any) -> Tensor:
        scale = 1.0 + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return scale * F.cross_entropy(model(batch[0] + 0.01 * torch.randn_like(batch[0])), batch[1])

    with unchanged(model, optimizer):
        examine(model, optimizer, noisy, batches, num_steps=10)


def test_batches_are_left_alone() -> None:
    batches, model = classes(), network()
    kept = copy.deepcopy(batches)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    examine(model, optimizer, loss_of(model), batches, num_steps=10)
    assert same(kept, batches)


def run(examined: bool, *, watched: bool, schedule: bool = False) -> Any:
    """Sixty steps, with an examination in the middle or without."""
    torch.manual_seed(0)
    random.seed(0)
    model, batches = network(), classes(number=60)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = loss_of(model)
    guard = None if watched else Guard(model, optimizer)
    watcher = steadystep.watch(model, optimizer) if watched else None
    plan = lr_scheduler.CosineAnnealingLR(optimizer, T_max=60) if schedule else None
    for number, batch in enumerate(batches):
        if watcher is not None:
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
        elif guard is not None:
            guard.step(loss, batch=batch)
        if plan is not None:
            plan.step()
        if examined and number == 30:
            if watcher is not None:
                watcher.guard.examine(batches[:9], loss=loss, num_steps=10)
            elif guard is not None:
                assert guard.examine(num_steps=10).causes
    kept = guard if watcher is None else watcher.guard
    assert kept is not None
    seen = (kept.updates, kept.attempts, [found.cause for found in kept.diagnose()])
    return state_of(model, optimizer), seen, torch.randn(3), random.random()


@pytest.mark.parametrize(("watched", "schedule"), [(False, False), (True, False), (True, True)])
def test_a_run_goes_on_as_if_there_had_been_none(watched: bool, schedule: bool) -> None:
    plain, examined = (run(each, watched=watched, schedule=schedule) for each in (False, True))
    assert same(plain, examined)
