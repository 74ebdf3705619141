"""What one line costs at the moment it is added: no heavy import, no random number, nothing for the compiler."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

import steadystep
from tests.loops import batches, small_net, squared

HEAVY = (
    "torch._dynamo",
    "sympy",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "rich",
    "tensorboard",
    "wandb",
    "mlflow",
)


def test_the_first_access_imports_nothing_heavy_and_draws_no_number() -> None:
    code = f"""
import random, sys
random.seed(0)
before = random.getstate()
import steadystep
steadystep.watch, steadystep.Guard
assert random.getstate() == before
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def with_guard(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    config = {"monitoring": {"sinks": ["console", "tensorboard"]}}
    steadystep.Guard(model, optimizer, config=config, run_dir=folder).close()


def with_watch(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    steadystep.watch(model, optimizer, run_dir=folder).remove()


@pytest.fixture
def _rich_is_not_imported_yet() -> Iterator[None]:
    """It draws when it is imported. Afterwards all of it is as before: two copies do not know each other's classes."""

    def taken() -> dict[str, ModuleType]:
        names = [n for n in sys.modules if n.split(".")[0] == "rich" or n == "steadystep.tracking.terminal"]
        return {name: sys.modules.pop(name) for name in names}

    before = taken()
    yield
    taken()
    sys.modules.update(before)
    for name, module in before.items():
        package, _, part = name.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], part, module)


@pytest.mark.usefixtures("_rich_is_not_imported_yet")
@pytest.mark.parametrize("attach", [with_guard, with_watch])
def test_attaching_leaves_every_random_state(attach: Callable[..., None], tmp_path: Path) -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    python, numpy, ours = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    attach(model, optimizer, tmp_path)
    assert random.getstate() == python
    assert (np.random.get_state()[1] == numpy).all()
    assert torch.equal(torch.get_rng_state(), ours)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's compiler, about torch's own scripting
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_step_does_not_trace_the_watcher(whole: bool) -> None:
    """`optimizer.step` alone, or the whole step of the loop, which torch breaks at `backward`."""
    torch._dynamo.reset()
    model = small_net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    update = optimizer.step if whole else torch.compile(optimizer.step, backend="eager")

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        squared(model, x).backward()
        update()

    loop = torch.compile(step, backend="eager") if whole else step
    with steadystep.watch(model, optimizer) as watcher:
        for i, x in enumerate(batches(4)):
            loop(x * float("nan") if i == 2 else x)
            assert watcher.outcome is not None
            assert watcher.outcome.stepped == (i != 2)
    traced = [code for code in (seen() for seen in torch._dynamo.convert_frame.input_codes.seen) if code is not None]
    assert traced
    ours = Path(steadystep.__file__).parent
    assert [code.co_qualname for code in traced if ours in Path(code.co_filename).parents] == []


@pytest.mark.slow
def test_a_guard_that_is_gone_does_not_disturb_the_end_of_the_program() -> None:
    """The optimizer lives on, its guard does not."""
    code = """
import gc, torch, steadystep
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard = steadystep.Guard(model, optimizer)
del guard
gc.collect()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
