"""Probes: exact on small tensors, close on large ones, bounded, and harmless to the step."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep.records import InputStats, Probe
from steadystep.signals.activations import Activations
from steadystep.signals.batches import Inputs
from steadystep.signals.gradients import Gradients
from steadystep.signals.probes import UpdateProbes
from steadystep.signals.samples import WHOLE, Strips


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, probes: UpdateProbes, step: int) -> Probe:
    optimizer.zero_grad()
    loss.backward()
    probes.before()
    optimizer.step()
    probes.after(step)
    return read(probes)


def read(probes: UpdateProbes) -> Probe:
    rows = probes.waiting
    record = probes.read(torch.cat(rows).tolist() if rows else [])
    assert record is not None
    return record


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 33), nn.ReLU(), nn.Linear(33, 2))


def obvious(
    params: dict[str, Tensor], before: dict[str, Tensor], optimizer: torch.optim.Optimizer, beta2: float, eps: float
) -> dict[str, list[float]]:
    """The formulas on whole tensors in double precision."""
    found: dict[str, list[float]] = {"w": [], "u": [], "v": [], "s": [], "z": []}
    for name, p in params.items():
        w, g = p.detach().double(), p.grad.double()
        found["w"].append(w.square().mean().sqrt().item())
        found["u"].append((w - before[name].double()).square().mean().sqrt().item())
        found["z"].append((g == 0).double().mean().item())
        state = optimizer.state[p]
        if "exp_avg_sq" in state:
            v = state["exp_avg_sq"].double()
            unbiased = v / (1 - beta2 ** float(state["step"]))
            squares = (g.square() / unbiased.clamp(min=eps**2))[g != 0]
            found["v"].append(unbiased.mean().item())
            found["s"].append(squares.mean().sqrt().item())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_small_tensors_are_measured_exactly(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer)
    for step in range(1, 4):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        record = update(model, optimizer, model(torch.randn(4, 6, dtype=dtype)).square().mean(), probes, step)
        twin = obvious(dict(model.named_parameters()), before, optimizer, 0.95, 1e-6)
        assert record.step == step
        assert record.names == tuple(before)
        assert record.weight_rms == pytest.approx(twin["w"], rel=1e-5)
        assert record.update_rms == pytest.approx(twin["u"], rel=1e-5)
        assert record.second_moments == pytest.approx(twin["v"], rel=1e-5)
        assert record.surprises == pytest.approx(twin["s"], rel=1e-4)
        assert record.zero_shares == pytest.approx(twin["z"], abs=1e-6)


def test_large_tensors_are_sampled_evenly() -> None:
    model = nn.Linear(512, 300)
    with torch.no_grad():
        model.weight.normal_(std=0.3)
        model.weight[:, 256:] *= 2  # half of the columns: a sample of few columns would miss the mean
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    record = update(model, optimizer, model(torch.randn(16, 512)).square().mean(), probes, 1)
    twin = obvious(dict(model.named_parameters()), before, optimizer, 0.999, 1e-8)
    assert record.weight_rms == pytest.approx(twin["w"], rel=0.1)
    assert record.update_rms == pytest.approx(twin["u"], rel=0.1)
    assert record.second_moments == pytest.approx(twin["v"], rel=0.3)
    assert record.surprises == pytest.approx(twin["s"], rel=0.1)


@pytest.mark.parametrize("shape", [(4097,), (64, 256), (768, 768), (5, 1000, 3), (1 << 20,)])
def test_a_sample_is_bounded_and_visits_rows_and_columns(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    rows = Strips([tensor.numel()], tensor.device).lay([tensor])
    assert rows.numel() <= WHOLE
    assert len(rows.unique()) == rows.numel()
    assert rows.max() > 0.7 * tensor.numel()
    for dim, size in enumerate(shape):
        visited = {int(i) // math.prod(shape[dim + 1 :]) % size for i in rows.flatten().tolist()}
        assert len(visited) >= min(size, rows.numel()) * 0.6


def test_memory_layout_does_not_change_what_is_compared() -> None:
    weight = torch.randn(40, 30, 3, 3)
    plain, last = (nn.Conv2d(30, 40, 3, bias=False) for _ in range(2))
    last.to(memory_format=torch.channels_last)
    records = []
    for model in (plain, last):
        with torch.no_grad():
            model.weight.copy_(weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        probes = UpdateProbes(Gradients(model, optimizer), optimizer)
        x = torch.linspace(-1, 1, 2 * 30 * 25).reshape(2, 30, 5, 5)
        records.append(update(model, optimizer, model(x).square().mean(), probes, 1))
    assert records[0].weight_rms == pytest.approx(records[1].weight_rms, rel=1e-5)
    assert records[0].surprises == pytest.approx(records[1].surprises, rel=1e-3)


def test_cadence() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer)
    assert [s for s in range(400) if probes.due(s)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 384]
    odd = UpdateProbes(Gradients(model, optimizer), optimizer, every=100)
    assert [s for s in range(301) if odd.due(s)] == [1, 2, 4, 8, 16, 32, 64, 100, 200, 300]


def test_sgd_has_no_moments_and_missing_gradients_are_left_out() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    probes = UpdateProbes(Gradients(model, optimizer), optimizer)
    model[0].requires_grad_(False)
    record = update(model, optimizer, model(torch.randn(4, 6)).square().mean(), probes, 1)
    assert record.names == ("2.weight", "2.bias", "4.weight", "4.bias")
    assert record.second_moments == record.surprises == ()
    assert all(rms > 0 for rms in record.update_rms)
    model[0].requires_grad_(True)
    assert len(update(model, optimizer, model(torch.randn(4, 6)).square().mean(), probes, 2).names) == 6


def test_rows_without_gradient_do_not_count_as_surprise() -> None:
    model = nn.Embedding(100, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer)
    record = update(model, optimizer, model(torch.tensor([3])).sum(), probes, 1)
    assert record.zero_shares == pytest.approx([0.99], abs=1e-6)
    assert record.surprises == pytest.approx([1.0], rel=1e-3), "the first step of Adam is as large as it expects"


def test_sparse_gradients_and_other_optimizers_beside_adam() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(50, 4, sparse=True), "head": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer)
    record = update(model, optimizer, model["head"](model["table"](torch.tensor([1, 2]))).sum(), probes, 1)
    assert math.isnan(record.zero_shares[0])
    assert record.zero_shares[1:] == (0.0, 0.0)
    assert all(rms > 0 for rms in record.update_rms)
    sparse = torch.optim.SparseAdam(model["table"].parameters(), lr=0.1)
    probes = UpdateProbes(Gradients(model["table"], sparse), sparse)
    record = update(model["table"], sparse, model["table"](torch.tensor([1, 2])).sum(), probes, 1)
    assert record.second_moments[0] > 0
    assert record.surprises == ()


@pytest.mark.parametrize("device", ["meta"])
def test_parameters_on_several_devices_are_measured_apart(device: str) -> None:
    """A second device is not at hand, so only the planning is looked at: one lot each."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device=device)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    probes.before()
    assert [lot.names for lot in probes._lots] == [("0.weight", "0.bias"), ("1.weight", "1.bias")]
    probes.cancel()


def test_a_refused_step_leaves_nothing_behind() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    probes = UpdateProbes(Gradients(model, optimizer), optimizer)
    model(torch.randn(4, 6)).sum().backward()
    probes.before()
    probes.cancel()
    assert probes.waiting == []
    assert probes.read([]) is None
    probes.after(1)
    assert probes.waiting == [], "after() without before() is nothing"


def test_a_tensor_that_cannot_be_sampled_costs_the_probe_and_not_the_step() -> None:
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer)
    update(model, optimizer, model(torch.randn(2, 100)).sum(), probes, 1)
    model.weight.data = torch.randn(3, 3)
    model.weight.grad = torch.ones(3, 3)
    model.bias.grad = torch.ones(100)
    probes.before()
    probes.after(2)
    assert probes.read([]) is None


def test_a_probe_that_fails_leaves_nothing_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer)
    update(model, optimizer, model(torch.randn(2, 100)).sum(), probes, 1)
    probes.before()
    lots = list(probes._lots)
    probes.cancel()
    assert all(lot._before is None for lot in lots), "the samples are let go of"

    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory")

    for method in ("remember", "measure"):
        probes.before()
        with monkeypatch.context() as patch:
            patch.setattr(f"steadystep.signals.samples.Lot.{method}", fail)
            if method == "remember":
                probes.before()
            probes.after(2)
        probes.after(3)
        assert probes.waiting == [], method
    model.extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [model.extra]})
    model.extra.grad = torch.ones(3)
    with monkeypatch.context() as patch:
        patch.setattr("steadystep.signals.probes.Lot", fail)
        probes.before()
    probes.before()
    probes.after(4)
    assert probes.waiting == [], "nothing was planned"


def test_a_parameter_that_takes_the_place_of_another_is_measured() -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer)
    update(model, optimizer, model(torch.randn(2, 3)).sum(), probes, 1)
    model.weight = nn.Parameter(torch.full((2, 3), 5.0))
    optimizer.param_groups[0]["params"] = [model.weight]
    record = update(model, optimizer, model(torch.zeros(2, 3)).sum(), probes, 2)
    assert (record.step, record.names, record.weight_rms) == (2, ("weight",), (5.0,))


def test_nothing_is_changed_and_nothing_kept() -> None:
    torch.manual_seed(1)
    plain, probed = net(), net()
    probed.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, probed)]
    probes = UpdateProbes(Gradients(probed, optimizers[1]), optimizers[1])
    for step in range(1, 6):
        x = torch.randn(4, 6)
        optimizers[0].zero_grad()
        plain(x).square().mean().backward()
        optimizers[0].step()
        update(probed, optimizers[1], probed(x).square().mean(), probes, step)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), probed.parameters(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), probed.parameters(), strict=True))


def test_what_is_pending_survives_a_save() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    activations = Activations(model)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer, activations=activations)
    with activations.watching():
        loss = model(torch.randn(32, 6)).square().mean()
    loss.backward()
    probes.before()
    optimizer.step()
    probes.after(8)
    expected = probes._make(torch.cat(probes.waiting).tolist())
    saved: dict[str, Any] = json.loads(json.dumps(probes.state_dict(), allow_nan=False))
    other = UpdateProbes(Gradients(model, optimizer), optimizer)
    other.load_state_dict(saved)
    assert expected.modules == ("1", "3")
    assert len(expected.dead) == len(expected.saturated) == 2
    assert other.read([]) == read(probes) == expected
    assert other.read([]) is None
    assert other.state_dict() == {"record": None}


def stats(batches: list[Any]) -> InputStats | None:
    inputs = Inputs()
    for batch in batches:
        inputs.add(batch)
    rows = inputs.waiting
    found = inputs.read(torch.cat(rows).tolist() if rows else [])
    inputs.add(batches[0])
    assert inputs.waiting == [], "once"
    return found


def test_inputs_are_described_as_one_sample_would_be() -> None:
    x = torch.randn(64, 5) * torch.tensor([1.0, 10.0, 100.0, 0.0, 1.0]) + 3.0
    found = stats([{"ids": torch.zeros(2, 2, dtype=torch.long), "x": part} for part in x.split((10, 20, 4, 30))])
    scales = x.double().std(0, correction=0)
    assert found is not None
    assert found.batches == 4
    assert found.mean == pytest.approx(x.mean().item(), rel=1e-4)
    assert found.std == pytest.approx(x.std(correction=0).item(), rel=1e-4)
    assert found.largest == x.abs().max().item()
    assert found.constant_share == pytest.approx(0.2)
    assert found.scale_spread == pytest.approx((scales[2] / scales[[0, 1, 4]].min()).item(), rel=1e-4)
    assert found.finite


def test_image_channels_are_features_and_odd_inputs_do_no_harm() -> None:
    images = torch.rand(4, 3, 8, 8) * torch.tensor([1.0, 1.0, 255.0]).view(3, 1, 1)
    found = stats([(images,)] * 4)
    assert found is not None
    assert found.scale_spread == pytest.approx(255, rel=0.1)
    bad = stats([torch.tensor([[1.0, math.inf], [math.nan, 2.0]])] * 4)
    assert bad is not None
    assert not bad.finite
    assert stats([torch.zeros(3, dtype=torch.long), None, "text", [[]]]) is None
    alone = stats([torch.rand(2, 3, 4), torch.rand(2, 5), torch.rand(1, 2, 3), torch.rand(3)])
    assert alone is not None
    assert (alone.batches, alone.scale_spread) == (2, 1.0)


def test_inputs_that_were_described_are_not_described_again() -> None:
    inputs = Inputs()
    inputs.load_state_dict({"done": True})
    for _ in range(5):
        inputs.add(torch.rand(2, 2))
    assert inputs.waiting == []
    assert inputs.state_dict() == {"done": True}
    inputs.load_state_dict(json.loads(json.dumps(Inputs().state_dict())))
    for _ in range(4):
        inputs.add(torch.rand(2, 2))
    assert inputs.waiting
