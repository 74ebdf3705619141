"""An incident again: from a bundle, in a model made anew."""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep._utils.rng import RngState
from steadystep.cli import train as command
from steadystep.cli.app import main
from steadystep.errors import ConfigError
from steadystep.guard import Guard
from steadystep.incidents import Incidents, load_factory, replay
from steadystep.incidents.without_guard import without_guard
from steadystep.pages.incident_groups import incident_groups
from steadystep.pages.report import report_page
from steadystep.precision import Precision
from steadystep.records import Diagnosis, Outcome, Plan, Signals
from steadystep.tracking import read

NAN = float("nan")
Made = tuple[nn.Module, Callable[..., Any]]


def make(width: int = 8) -> Made:
    """Overflows in fp16 for inputs of 100: the first layer is too large."""
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))

    def closure(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (model(x).float().squeeze(-1) - y).square().mean()

    return model, closure


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Trains nothing, but writes down one step."""

    def once(*, factor: float = 1.0, fp16: bool = False, batch: bool = True, lie: float | None = None) -> Path:
        torch.manual_seed(5)
        model, closure = make()
        model[2].eval()
        precision = Precision("fp16" if fp16 else "fp32")
        with torch.no_grad():
            model[0].weight.mul_(factor)
        data = (torch.randn(16, 4), torch.randn(16))
        work = closure if batch else lambda: closure(data)
        incidents, rng = Incidents(tmp_path / "run"), RngState(torch.device("cpu"))
        torch.rand(3)  # the forward pass
        case = incidents.open(
            step=3, updates=3, model=model, work=work, batch=data if batch else None, rng=rng, precision=precision
        )
        seen = case.examination
        loss = seen.loss if lie is None else lie
        outcome = Outcome(
            step=3,
            reading=loss,
            stepped=False,
            plan=Plan(actions=("skip-step",)),
            diagnosis=Diagnosis(evidence="the loss is odd"),
            signals=Signals(step=3, loss=loss, grad_norm=seen.grad_norm if lie is None else lie),
        )
        path = incidents.report(outcome, case)
        assert path is not None
        return path

    return once


def test_a_nan_reproduces_in_a_new_model(run: Callable[..., Path]) -> None:
    done = replay(run(factor=1e30), make)
    assert done.reproduces
    assert done.now.origin == done.then
    assert done.now.origin.phase == "loss"
    assert done.what == "the loss is odd"


def test_finite_numbers_reproduce_with_dropout_and_modes(run: Callable[..., Path]) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    path = run()
    torch.set_rng_state(before)
    done = replay(path, make)
    assert done.reproduces
    assert done.now.loss == done.seen_loss
    assert done.now.grad_norm == done.seen_norm
    assert done.now.finite
    assert torch.get_rng_state().equal(_after_making(before))


def _after_making(state: Tensor) -> Tensor:
    torch.set_rng_state(state)
    make()
    return torch.get_rng_state()


@pytest.mark.parametrize("lie", [NAN, 1e6])
def test_a_transient_fault_does_not(run: Callable[..., Path], lie: float) -> None:
    done = replay(run(lie=lie), make)
    assert not done.reproduces
    assert done.now.finite


def test_another_precision_would_have_survived(run: Callable[..., Path]) -> None:
    path = run(factor=1e6, fp16=True)
    as_it_was = replay(path, make)
    assert as_it_was.precision == "fp16"
    assert as_it_was.now.origin.module == "0"
    assert as_it_was.reproduces
    better = replay(path, make, precision="fp32")
    assert better.now.finite
    assert not better.reproduces


def test_without_a_batch(run: Callable[..., Path]) -> None:
    path = run(batch=False, factor=1e30)
    with pytest.raises(ConfigError, match=r"takes a batch, and the bundle has none \(not passed"):
        replay(path, make)

    def alone() -> Made:
        model, closure = make()
        return model, lambda: closure((torch.ones(16, 4), torch.ones(16)))

    assert replay(path, alone).reproduces
    assert replay(run(factor=1e30), alone).reproduces, "a closure that takes nothing is given nothing"


def test_a_closure_with_a_default_gets_the_batch(run: Callable[..., Path]) -> None:
    got = []

    def factory() -> Made:
        model, closure = make()

        def with_default(batch: Any = None) -> Tensor:
            got.append(batch)
            return closure(batch)

        return model, with_default

    assert replay(run(), factory).reproduces
    assert got[0][0].shape == (16, 4)


def _raises() -> Made:
    raise ValueError("no data here")


def _failing() -> Made:
    def closure(_: Any) -> Tensor:
        raise IndexError("out of range")

    return make()[0], closure


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class More(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*make()[0])
        self.extra = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda: make(9), r"parameter '0.weight' has shape \[8, 4\] in the bundle and \[9, 4\] in the factory's model"),
        (lambda: (Other(), print), r"parameter '0.weight' is in the bundle but not in the factory's model: did you"),
        (lambda: (More(), print), "parameter 'extra' of the factory's model is not in the bundle"),
        (lambda: make()[0], r"must return \(model, closure\), it returned Sequential"),
        (lambda: (1, 2, 3), r"it returned \(int, int, int\)"),
        (_raises, "the factory raised ValueError: no data here"),
        (_failing, "the closure raised IndexError: out of range"),
    ],
)
def test_a_factory_that_does_not_fit(run: Callable[..., Path], factory: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replay(run(), factory)


def test_choices_that_do_not_exist(run: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="'fp64' is unknown: use one of fp32, bf16, fp16"):
        replay(run(), make, precision="fp64")
    with pytest.raises(ConfigError, match="device 'nowhere' cannot be used"):
        replay(run(), make, device="nowhere")
    assert replay(run(), make, device="cpu").reproduces


@pytest.mark.parametrize(
    "name", ["", "json", ":make", "json:", "no_such_module_here:make", "json:no_such", "json:codecs"]
)
def test_a_factory_that_cannot_be_loaded(name: str) -> None:
    with pytest.raises(ConfigError, match="--factory"):
        load_factory(name)


def test_a_factory_inside_something() -> None:
    assert load_factory("json:JSONDecoder.decode") is json.JSONDecoder.decode


@pytest.mark.parametrize("part", ["outcome", "origin"])
def test_an_incomplete_record(run: Callable[..., Path], part: str) -> None:
    path = run()
    record = json.loads((path / "incident.json").read_text())
    record[part] = {"nonsense": 1}
    (path / "incident.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="is incomplete"):
        replay(path, make)


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ({"factor": 1e6, "fp16": True}, 1, "origin      0 (Linear), forward"),
        ({"lie": NAN}, 0, "not reproduced: a transient fault"),
        ({"lie": 5.0}, 0, "not reproduced: loss or gradient norm differ"),
        ({}, 1, "verdict     reproduced"),
    ],
)
def test_what_is_printed(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str], how: dict[str, Any], code: int, said: str
) -> None:
    path = str(run(**how))
    name = f"{__name__}:make"
    assert command.run_replay(path, factory=name, precision=None, device=None, as_json=False) == code
    assert said in capsys.readouterr().out


def test_would_it_have_survived(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(run(factor=1e6, fp16=True))
    name = f"{__name__}:make"
    assert command.run_replay(path, factory=name, precision="fp32", device=None, as_json=False) == 0
    assert "verdict     not reproduced in fp32" in capsys.readouterr().out
    assert command.run_replay(path, factory=name, precision="fp32", device=None, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["reproduces"] is False
    assert told["then"]["module"] == "0"
    assert told["now"]["origin"]["phase"] == "none"


def test_the_command(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(run(factor=1e30))
    (tmp_path / "my_training.py").write_text(f"from {__name__} import make\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])

    def steadystep(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["steadystep", "replay", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        said = capsys.readouterr()
        return int(done.value.code or 0), said.out, said.err

    code, told, _ = steadystep(path, "--factory", "my_training:make", "--json")
    assert code == 1
    assert json.loads(told)["verdict"] == "reproduced"
    assert steadystep(str(run(lie=NAN)), "--factory", "my_training:make")[0] == 0
    code, told, complaint = steadystep("nowhere", "--factory", "my_training:make")
    assert (code, told) == (2, "")
    assert complaint.startswith("error: nowhere: no such folder")
    assert steadystep(path)[0] == 2
    assert "Example: steadystep replay" in steadystep("--help")[1]


def data() -> list[Tensor]:
    """The sixth batch is too large."""
    random = torch.Generator().manual_seed(1)
    return [torch.randn(16, 4, generator=random) * (1e25 if i == 5 else 1.0) for i in range(9)]


def job() -> tuple[nn.Module, Callable[[Tensor], Tensor], torch.optim.Optimizer, list[Tensor]]:
    """Model, closure, optimizer, and the batches after the sixth."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(), optimizer, data()[6:]


@pytest.fixture
def refused(tmp_path: Path) -> tuple[Path, list[float]]:
    """The bundle of a guarded run, and the losses of the same run without a guard."""
    model, closure, optimizer, _ = job()
    losses = []
    for x in data():
        loss = closure(x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model, closure, optimizer, _ = job()
    settings = {"training": {"max_grad_norm": 1.0}, "monitoring": {"sinks": []}}
    with Guard(model, optimizer, run_dir=tmp_path / "run", config=settings) as guard:
        found = [guard.step(closure, batch=x) for x in data()]
    bundles = [Path(outcome.incident) for outcome in found if outcome.incident]
    assert [bundle.name for bundle in bundles] == ["incident-000005-skip"]
    return bundles[0], losses


def test_without_the_guard_it_is_the_plain_loop(refused: tuple[Path, list[float]]) -> None:
    bundle, losses = refused
    done = without_guard(bundle, job, steps=4)
    assert done.step == 5
    assert not done.same_batch
    assert list(map(str, done.losses)) == list(map(str, losses[5:9])), "bit for bit, NaN included"
    assert done.lost_at is None or not math.isfinite(losses[done.lost_at])
    again = without_guard(bundle, lambda: job()[:3], steps=3)
    assert again.same_batch
    assert again.losses[0] == done.losses[0]


def test_the_report_draws_what_the_command_found(
    refused: tuple[Path, list[float]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, losses = refused
    monkeypatch.setattr(command, "load_factory", lambda _: job)
    run = read(bundle.parent.parent)
    assert "not tried: add <code>--without-guard 20</code>" in report_page(run)
    with pytest.raises(SystemExit):
        _replay(monkeypatch, str(bundle), "--factory", "m:make", "--without-guard", "4", "--json")
    told = json.loads(capsys.readouterr().out)["without_guard"]
    assert told["losses"][0] == str(losses[5]) == "inf"
    (group,) = (e for e in incident_groups(run) if e.first == 5)
    assert group.unguarded is not None
    assert group.unguarded.loss.steps.tolist() == [5, 6, 7, 8]
    page = report_page(run)
    assert "not tried" not in page
    assert '"name":"without the guard"' in page
    (bundle / "without_guard.json").write_text('{"step": 5, "loss": ["<b>"], "norm": [1]}')
    assert incident_groups(run)[0].unguarded is None, "anything else is no line"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: job()[:2], "must return (model, closure, optimizer)"),
        (lambda: (*job()[:2], torch.optim.Adam([nn.Parameter(torch.ones(1))])), "optimizer does not fit"),
        (lambda: (job()[0], lambda x: 1 / 0, job()[2]), "the closure raised ZeroDivisionError"),
    ],
)
def test_a_factory_that_does_not_fit_is_a_clear_error(
    refused: tuple[Path, list[float]], make: Callable[[], Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        without_guard(refused[0], make)


def _replay(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["steadystep", "replay", *arguments])
    main()
