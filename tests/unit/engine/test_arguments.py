"""What a call may be given, and what is refused before anything is changed."""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import steadystep
from steadystep.config import Config
from steadystep.engine import arguments
from steadystep.engine.learning_rate import check_rates
from steadystep.errors import ConfigError, MisuseError


class Kept:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Detects(Kept):
    name = "mine"

    def update(self, signals: Any) -> tuple[()]:
        return ()


class Half:
    def state_dict(self) -> dict[str, Any]:
        return {}


def sink(*without: str) -> Any:
    names = {"start", "step", "validation", "layers", "histograms", "incident", "close"} - set(without)
    return SimpleNamespace(**{name: lambda *_: None for name in names})


def meta(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device="meta")


LOSS = torch.tensor(1.0, requires_grad=True)
REFUSED: dict[str, Callable[[], Any]] = {
    "work": lambda: arguments.check_work(3.0),
    "inside": lambda: arguments.refuse_inside("save", busy=True),
    "model": lambda: arguments.check_model(lambda x: x),
    "storage": lambda: arguments.check_storage(nn.Linear(2, 2, device="meta")),
    "a loss that is a number": lambda: arguments.check_loss("inspect", 1.0),
    "two losses": lambda: arguments.check_loss("inspect", torch.ones(2)),
    "a whole number as a loss": lambda: arguments.check_loss("inspect", torch.tensor(1)),
    "a loss on meta": lambda: arguments.check_loss("inspect", meta(1)),
    "a text as a number": lambda: arguments.real_number("weight", "3"),
    "bytes as a number": lambda: arguments.real_number("weight", b"3"),
    "two numbers": lambda: arguments.real_number("weight", torch.ones(2)),
    "nothing as a number": lambda: arguments.real_number("weight", None),
    "a number on meta": lambda: arguments.real_number("weight", meta(1)),
    "a number beyond all": lambda: arguments.real_number("weight", 10**400),
    "kept without a name": lambda: arguments.check_kept("", Kept(), None),
    "kept under a number": lambda: arguments.check_kept(3, Kept(), None),
    "half a kept object": lambda: arguments.check_kept("ema", Half(), None),
    "a class to keep": lambda: arguments.check_kept("ema", Kept, None),
    "an update that cannot be called": lambda: arguments.check_kept("ema", Kept(), 3),
    "a list as a state": lambda: arguments.saved_state([1]),
    "a number as a folder": lambda: arguments.folder("run_dir", 3),
    "a zero byte in a folder": lambda: arguments.folder("run_dir", "a\0b"),
    "bytes as a folder": lambda: arguments.folder("run_dir", SimpleNamespace()),
    "no loader": lambda: arguments.check_loader(3),
    "a detector without update": lambda: arguments.check_extras([Kept()], []),
    "the class of a detector": lambda: arguments.check_extras([Detects], []),
    "a detector without a name": lambda: arguments.check_extras([_named(None)], []),
    "a sink without close": lambda: arguments.check_extras([], [sink("close")]),
    "a sink by name": lambda: arguments.check_extras([], "wandb"),
    "a mapping as a list": lambda: arguments.sequence("detectors", {}),
    "bytes as a list": lambda: arguments.sequence("detectors", b"ab"),
    "one thing as a list": lambda: arguments.sequence("detectors", 3),
    "a copy": arguments.refuse_copy,
    "a scaler that is none": lambda: arguments.checked_scaler(3),  # type: ignore[arg-type]
    "half a scaler": lambda: arguments.checked_scaler(SimpleNamespace(is_enabled=bool)),  # type: ignore[arg-type]
    "the other half": lambda: arguments.checked_scaler(SimpleNamespace(get_scale=bool)),  # type: ignore[arg-type]
    "a listener that is none": lambda: arguments.checked_listener(3),  # type: ignore[arg-type]
    "a scheduler without step": lambda: arguments.checked_schedulers([Kept()]),
    "the class of a scheduler": lambda: arguments.checked_schedulers([torch.optim.lr_scheduler.StepLR]),
}


def _named(name: Any) -> Detects:
    detector = Detects()
    detector.name = name
    return detector


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused(refused: Callable[[], Any]) -> None:
    with pytest.raises(MisuseError):
        refused()


def test_what_is_fine_is_let_through_as_it_is() -> None:
    model = nn.Linear(2, 2)
    arguments.check_work(LOSS)
    arguments.check_work(lambda: LOSS)
    arguments.refuse_inside("save", busy=False)
    arguments.check_model(model)
    arguments.check_storage(model)
    assert arguments.check_loss("inspect", LOSS) is LOSS
    arguments.check_kept("ema", Kept(), None)
    arguments.check_kept("ema", Kept(), lambda: None)
    state: dict[str, Any] = {}
    assert arguments.saved_state(state) is state
    arguments.check_loader([1])
    arguments.check_loader(torch.utils.data.TensorDataset(torch.zeros(2)))
    arguments.check_extras([Detects()], [sink()])
    given = [1, 2]
    assert arguments.sequence("x", given) is given
    assert arguments.sequence("x", iter(given)) == (1, 2)
    assert arguments.checked_scaler(None) is None
    scaler = torch.amp.GradScaler("cpu")
    assert arguments.checked_scaler(scaler) is scaler
    assert arguments.checked_listener(None) is None
    assert arguments.checked_listener(print) is print
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = [torch.optim.lr_scheduler.StepLR(optimizer, 1), SimpleNamespace(step_update=lambda count: None)]
    assert arguments.checked_schedulers(steps) is steps


@pytest.mark.parametrize(
    "value", [3, 3.0, True, np.float32(3.0), np.array([3.0]), torch.tensor(3), torch.tensor([[3.0]])]
)
def test_one_real_number(value: object) -> None:
    assert arguments.real_number("weight", value) in (3.0, 1.0)
    assert type(arguments.real_number("weight", value)) is float


@pytest.mark.parametrize("path", ["runs/a", Path("runs/a")])
def test_a_folder_as_text_or_path(path: object) -> None:
    assert arguments.folder("run_dir", path) == Path("runs/a")
    assert arguments.folder("run_dir", "~/a") == Path.home() / "a"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.ones(2, 3), r"float32 .*\[2, 3\]"),
        (torch.tensor(1), "int64"),
        (Kept, "Kept"),
        (None, "None"),
        ("x" * 100, "x{30,39}$"),
        (2.5, "float 2.5"),
        (Kept(), "Kept$"),
    ],
)
def test_the_error_shows_what_was_given(value: object, shown: str) -> None:
    assert re.search(shown, arguments._a(value))


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Around(torch.optim.SGD):
    """An optimizer that holds another one, as some frameworks' do."""


def test_torchs_optimizer_is_found_inside_of_others() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    inner = torch.optim.SGD(parameters, lr=0.1)
    outer = Around(parameters, lr=0.1)
    outer.optimizer = inner  # type: ignore[attr-defined]
    for given in (inner, Wrapper(inner), outer, Wrapper(outer)):
        assert arguments.torch_optimizer(given) is inner  # type: ignore[arg-type]
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    several = arguments.torch_optimizer([Wrapper(inner), other])  # type: ignore[list-item]
    assert list(several.each) == [inner, other]  # type: ignore[attr-defined]
    assert arguments.inner_optimizer(Wrapper("text")).optimizer == "text"


@pytest.mark.parametrize(
    "settings",
    [
        {"training": {"mixed_precision": "bf16"}},
        {"training": {"gradient_accumulation_steps": 2}},
        {"training": {"fp32_modules": ["*norm*"]}},
        {"monitoring": {"save_checkpoints": True}},
        {"monitoring": {"recompute_every": 10}},
    ],
)
def test_what_the_loop_does_itself_cannot_be_asked_for(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(next(iter(settings.values()))))):
        arguments.checked_settings(Config.load(settings))
    plain = Config.load({})
    assert arguments.checked_settings(plain) is plain


def optimizer_of(*groups: dict[str, Any]) -> Any:
    return SimpleNamespace(param_groups=list(groups))


def test_rates_that_one_can_multiply() -> None:
    weight = [nn.Parameter(torch.ones(1))]
    for rate in (0.1, 1, torch.tensor(0.1), float("nan"), True):
        check_rates(optimizer_of({"params": weight, "lr": rate}))
    check_rates(optimizer_of({"params": weight}))
    check_rates(optimizer_of({"params": [], "lr": 0.1}, {"params": weight, "lr": 0.1}))
    check_rates(optimizer_of({"params": weight, "lr": 0.1}, {"params": [], "lr": 0.1}))
    for bad in ("0.1", None, [0.1]):
        with pytest.raises(MisuseError, match="group 1"):
            check_rates(optimizer_of({"params": weight, "lr": 0.1}, {"params": weight, "lr": bad}))
    for empty in ((), ({"params": [], "lr": 0.1},)):
        with pytest.raises(MisuseError):
            check_rates(optimizer_of(*empty))


@pytest.mark.parametrize("response", [False, True])
def test_a_step_waits_for_a_copy_of_the_weights(response: bool) -> None:
    """Handed over as a future, or as what `dcp.async_save` returned; its error is not ours."""
    model = torch.nn.Linear(2, 1)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before, seen = model.weight.detach().clone(), []

    def copied() -> None:
        time.sleep(0.1)
        seen.append(model.weight.detach().clone())
        raise OSError("disk full")

    with ThreadPoolExecutor(1) as thread:
        staging = thread.submit(copied)
        guard.wait_for(SimpleNamespace(staging_completion=staging) if response else staging)
        assert guard.step(lambda: model(torch.ones(3, 2)).square().mean()).stepped
        assert staging.done()
    assert torch.equal(seen[0], before)
    assert not torch.equal(model.weight, before)
    with pytest.raises(MisuseError, match="takes a future"):
        guard.wait_for("folder")
    guard.close()
