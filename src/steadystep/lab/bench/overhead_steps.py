"""The loops that are compared: plain, guarded; and what each reads on the host and holds in memory."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import steadystep
from steadystep.lab.tasks.text import GPT, GPTSize

Setup = tuple[nn.Module, Callable[[], Tensor]]
"""A model and its loss on a fixed batch."""


def mlp(width: int, depth: int = 3, batch_size: int = 32) -> Setup:
    """Linear layers and ReLUs."""
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    x = torch.randn(batch_size, width)
    return model, lambda: model(x).square().mean()


def gpt() -> Setup:
    """A byte GPT of 1M parameters."""
    model = GPT(GPTSize(d_model=128, num_layers=5, num_heads=4, context=64))
    text = torch.randint(256, (8, 65))
    return model, lambda: model.loss(text)


def many_tensors(count: int) -> Setup:
    """Vectors of 16 numbers: nothing but the price of a tensor."""
    model = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(count))
    return model, lambda: torch.stack(list(model)).square().mean()


MODELS: dict[str, Callable[[], Setup]] = {
    "MLP, width 64": lambda: mlp(64),
    "MLP, width 256": lambda: mlp(256),
    "MLP, width 1024": lambda: mlp(1024),
    "GPT, 1M parameters": gpt,
    "100 small tensors": lambda: many_tensors(100),
    "1,000 small tensors": lambda: many_tensors(1000),
}
"""By the name shown in the table."""

QUICK = ("MLP, width 64",)


def fresh(name: str) -> Setup:
    """The same weights every time."""
    torch.manual_seed(0)
    return MODELS[name]()


TimedStep = Callable[[], object]

_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")


def plain_step(setup: Setup) -> TimedStep:
    """The loop that most people have: clip_grad_norm_ and loss.item()."""
    model, compute = setup
    optimizer = adamw(setup)
    parameters = list(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = compute()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()  # sync: as everybody does

    return step


def guarded_step(setup: Setup, run_dir: Path) -> TimedStep:
    """A guard as it comes out of the box, with a folder to write to."""
    model, compute = setup
    guard = steadystep.Guard(model, adamw(setup), run_dir=run_dir)
    return lambda: guard.step(compute).loss


def adamw(setup: Setup) -> Optimizer:
    """For every loop."""
    return torch.optim.AdamW(setup[0].parameters(), lr=1e-4)


def reads_per_step(step: TimedStep, repeats: int = 20) -> float:
    """Times that a tensor is read on the host, without those of torch's AdamW itself (its step counts)."""
    with _counted() as reads:
        inside = False

        def enter(optimizer: Optimizer, *_: Any) -> None:
            nonlocal inside
            inside = type(optimizer) is torch.optim.AdamW
            own.append(len(reads))

        def leave(optimizer: Optimizer, *_: Any) -> None:
            nonlocal inside
            if inside:
                del reads[own[-1] :]
            inside = False

        own: list[int] = []
        hooks = register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)
        try:
            for _ in range(repeats):
                step()
        finally:
            for hook in hooks:
                hook.remove()
    return len(reads) / repeats


@contextmanager
def _counted() -> Iterator[list[str]]:
    seen: list[str] = []
    kept = {name: getattr(torch.Tensor, name) for name in _READS}
    for name in _READS:
        setattr(torch.Tensor, name, _counting(name, kept[name], seen))
    try:
        yield seen
    finally:
        for name, original in kept.items():
            setattr(torch.Tensor, name, original)


def _counting(name: str, original: Any, seen: list[str]) -> Any:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return original(self, *args, **kwargs)

    return read


def bytes_within(step: TimedStep) -> int:
    """In all tensors that a loop holds: weights, moments, and whatever its tools keep; each storage counted once."""
    waiting: list[Any] = [step]
    seen: set[int] = set()
    storages: dict[int, int] = {}
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType | str | bytes | int | float):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            continue  # why: gradients come and go, and the graph behind a loss is nobody's property
        if isinstance(thing, FunctionType):
            waiting += [*(thing.__closure__ or ()), *(thing.__defaults__ or ())]  # not its module's globals
        else:
            waiting += gc.get_referents(thing)
    return sum(storages.values())
