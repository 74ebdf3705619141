"""Promise 1: with no incident, a guarded run is bit-identical to the plain loop."""

import math

import pytest
import torch
from torch import Tensor, nn

import steadystep
from tests.loops import OPTIMIZERS, assert_same, batches, full_state, plain_run, small_net, squared

NEVER, ALWAYS = 1e6, 1e-2  # a clip that does not fire and one that does


def guarded_run(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor], config: dict) -> list[float]:
    guard = steadystep.Guard(model, optimizer, config=config)
    losses = [guard.step(lambda x=x: squared(model, x)).loss for x in data]
    guard.close()
    return losses


@pytest.mark.parametrize("max_norm", [None, NEVER, ALWAYS])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits_as_the_plain_loop(name: str, precision: str, accumulate: int, max_norm: float | None) -> None:
    data = batches(24)
    plain, guarded = small_net(), small_net()
    plain_optimizer, guarded_optimizer = (OPTIMIZERS[name](m.parameters()) for m in (plain, guarded))
    torch.manual_seed(7)
    expected = plain_run(
        plain, plain_optimizer, data, accumulate=accumulate, max_norm=max_norm, bf16=precision == "bf16"
    )
    torch.manual_seed(7)
    training = {"gradient_accumulation_steps": accumulate, "mixed_precision": precision, "max_grad_norm": max_norm}
    losses = guarded_run(guarded, guarded_optimizer, data, {"training": training})
    assert_same(full_state(plain, plain_optimizer), full_state(guarded, guarded_optimizer))
    if accumulate == 1:
        assert losses == expected


@pytest.mark.parametrize("max_norm", [None, ALWAYS])
def test_fp16_with_overflows_is_torchs_own_scaler_loop(max_norm: float | None) -> None:
    data = [x * (50.0 if i in (3, 9) else 1.0) for i, x in enumerate(batches(16))]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x).float() * 1e2).square().mean()

    plain, guarded = (nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)) for _ in range(2))
    guarded.load_state_dict(plain.state_dict())
    plain_optimizer, guarded_optimizer = (torch.optim.SGD(m.parameters(), lr=1e-5) for m in (plain, guarded))
    scaler = torch.amp.GradScaler("cpu")
    plain_run(plain, plain_optimizer, data, max_norm=max_norm, scaler=scaler, loss_fn=loss_fn)
    config = {"training": {"mixed_precision": "fp16", "max_grad_norm": max_norm}}
    guard = steadystep.Guard(guarded, guarded_optimizer, config=config)
    outcomes = [guard.step(lambda x=x: loss_fn(guarded, x)) for x in data]
    assert any(not o.stepped for o in outcomes), "no overflow: this test shows nothing"
    assert any(o.stepped for o in outcomes)
    assert {o.diagnosis.cause for o in outcomes} == {"healthy", "scale-overflow"}
    assert_same(full_state(plain, plain_optimizer), full_state(guarded, guarded_optimizer))
    assert guard.precision.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_observe_is_the_plain_loop_even_when_it_goes_nan(max_norm: float | None) -> None:
    data = batches(12)
    data[5] = data[5] * math.nan
    plain, guarded = small_net(), small_net()
    plain_optimizer, guarded_optimizer = (torch.optim.AdamW(m.parameters()) for m in (plain, guarded))
    torch.manual_seed(7)
    plain_run(plain, plain_optimizer, data, max_norm=max_norm)
    torch.manual_seed(7)
    config = {"mode": "observe", "training": {"max_grad_norm": max_norm}}
    guard = steadystep.Guard(guarded, guarded_optimizer, config=config)
    outcomes = [guard.step(lambda x=x: squared(guarded, x)) for x in data]
    assert all(o.stepped for o in outcomes)
    assert outcomes[5].findings
    assert_same(full_state(plain, plain_optimizer), full_state(guarded, guarded_optimizer))


@pytest.mark.filterwarnings("ignore:steadystep. these weights are fp16")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_norm", [NEVER, 0.37, ALWAYS])
def test_other_dtypes_clip_as_torch_does(dtype: torch.dtype, max_norm: float) -> None:
    data = [x.to(dtype) for x in batches(12)]
    plain, guarded = small_net().to(dtype), small_net().to(dtype)
    plain_optimizer, guarded_optimizer = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (plain, guarded))
    torch.manual_seed(7)
    plain_run(plain, plain_optimizer, data, max_norm=max_norm)
    torch.manual_seed(7)
    guarded_run(guarded, guarded_optimizer, data, {"training": {"max_grad_norm": max_norm}})
    assert_same(full_state(plain, plain_optimizer), full_state(guarded, guarded_optimizer))


@pytest.mark.filterwarnings("ignore:steadystep. these weights are fp16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("off", [-2e-2, -1e-3, -1e-6, -1e-7, 0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 4e-3])
def test_clipping_at_the_very_edge_of_its_limit(off: float, dtype: torch.dtype) -> None:
    for seed in range(4):
        x = batches(1, seed)[0].to(dtype)
        plain, guarded = (small_net(seed, dropout=0.0).to(dtype) for _ in range(2))
        probe = small_net(seed, dropout=0.0).to(dtype)
        squared(probe, x).backward()
        max_norm = torch.nn.utils.get_total_norm([p.grad for p in probe.parameters()]).item() * (1 + off)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (plain, guarded)]
        plain_run(plain, optimizers[0], [x], max_norm=max_norm)
        guarded_run(guarded, optimizers[1], [x], {"training": {"max_grad_norm": max_norm}})
        assert_same(full_state(plain, optimizers[0]), full_state(guarded, optimizers[1]))


def test_mixed_dtypes_in_one_model_clip_as_torch_does() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8).double(), nn.Linear(8, 1).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).double()).bfloat16()).float()

    torch.manual_seed(0)
    plain, guarded = Mixed(), Mixed()
    guarded.load_state_dict(plain.state_dict())
    plain_optimizer, guarded_optimizer = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (plain, guarded))
    data = batches(12)
    plain_run(plain, plain_optimizer, data, max_norm=0.5)
    guarded_run(guarded, guarded_optimizer, data, {"training": {"max_grad_norm": 0.5}})
    assert_same(full_state(plain, plain_optimizer), full_state(guarded, guarded_optimizer))


def test_random_numbers_are_not_consumed() -> None:
    model = small_net()
    guard = steadystep.Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config={"training": {"gradient_accumulation_steps": 2}}
    )
    torch.manual_seed(3)
    for x in batches(4):
        squared(model, x).backward()
    model.zero_grad()
    expected = torch.rand(3)
    torch.manual_seed(3)
    for x in batches(4):
        guard.step(lambda x=x: squared(model, x))
    assert torch.equal(torch.rand(3), expected)
