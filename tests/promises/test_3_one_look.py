"""Promise 3: one device-to-host read per optimizer step serves everything."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import steadystep
from tests.loops import batches, small_net, squared

pytestmark = pytest.mark.core

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every way of reading a tensor on the host, called by anyone."""
    seen: list[str] = []
    with monkeypatch.context() as patch:
        for name in READS:
            original = getattr(torch.Tensor, name)

            def read(self, *args, _original=original, _name=name, **kwargs):
                seen.append(_name)
                return _original(self, *args, **kwargs)

            patch.setattr(torch.Tensor, name, read)
        yield seen


@pytest.mark.parametrize("mode", ["observe", "careful", "autopilot"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_read_per_optimizer_step(mode: str, accumulate: int, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)  # its own step reads nothing
    config = {"mode": mode, "training": {"gradient_accumulation_steps": accumulate, "max_grad_norm": 0.1}}
    guard = steadystep.Guard(model, optimizer, config=config, run_dir=tmp_path)
    data = batches(20 * accumulate)
    with counted_reads(monkeypatch) as reads:
        for x in data:
            outcome = guard.step(lambda x=x: squared(model, x), metrics={"kl": x.mean()})
    assert guard.updates == 20
    assert reads == ["tolist"] * 20
    assert outcome.signals.metrics == {"kl": pytest.approx(data[-1].mean().item())}


def test_fp16_adds_nothing_to_the_read_torchs_scaler_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = steadystep.Guard(model, optimizer, config={"training": {"mixed_precision": "fp16"}})
    with counted_reads(monkeypatch) as reads:
        for x in batches(5):
            assert guard.step(lambda x=x: 0.01 * model(x).float().square().mean()).signals.scale == 65536.0
    assert sorted(reads) == ["item"] * 5 + ["tolist"] * 5


def test_a_learning_rate_held_in_a_tensor_rides_along(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(
        [{"params": [model.weight], "lr": torch.tensor(0.25)}, {"params": [model.bias], "lr": torch.tensor(0.125)}]
    )
    guard = steadystep.Guard(model, optimizer)
    monkeypatch.setattr(optimizer, "step", lambda: None)  # torch's own SGD reads a tensor learning rate
    with counted_reads(monkeypatch) as reads:
        outcome = guard.step(lambda: squared(model, batches(1)[0]))
    assert outcome.signals.lr == 0.25
    assert reads == ["tolist"]


class CountNorms(TorchDispatchMode):
    """How many elements norms were taken over."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "norm" in str(func) and "batch_norm" not in str(func):
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.elements += sum(t.numel() for t in tensors)
        return func(*args, **(kwargs or {}))


def test_one_pass_over_the_gradients_also_when_clipping() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    guard = steadystep.Guard(model, optimizer, config={"training": {"max_grad_norm": 1e-3}})
    x = batches(1)[0]
    guard.step(lambda: squared(model, x))
    with CountNorms() as counted:
        outcome = guard.step(lambda: squared(model, x))
    assert outcome.clipped
    num_elements = sum(p.numel() for p in model.parameters())
    num_tensors = len(list(model.parameters()))
    assert counted.elements == num_elements + num_tensors  # once over the gradients, once over their norms
