"""What sharded gradients must do, told by whole ones: run by every rank of a process group, be it one or two."""

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from steadystep import UnsupportedError, clip
from steadystep.clip import ClipReport

Clipper = Callable[[list[Parameter]], ClipReport]

# Whole, by rows unevenly, by columns, a vector, one row (nothing for a second rank), filters, a scalar; None: plain.
LAYOUT: list[tuple[tuple[int, ...], Placement | None]] = [
    ((4, 3), Replicate()),
    ((5, 3), Shard(0)),
    ((3, 4), Shard(1)),
    ((7,), Shard(0)),
    ((1, 3), Shard(0)),
    ((2, 3, 2), Shard(0)),
    ((), Replicate()),
    ((2, 2), None),
]

CLIPPERS: dict[str, Callable[[], Clipper]] = {
    "global norm": lambda: lambda p: clip.clip_global_norm_(p, max_norm=1.0),
    "value": lambda: lambda p: clip.clip_value_(p, max_value=0.5),
    "per unit": lambda: lambda p: clip.agc_(p, clip_factor=0.1),
    "z-score": lambda: clip.ZScoreClip(warmup_steps=3).clip_,
    "percentile": lambda: clip.PercentileClip(percentile=50).clip_,
    "tensor EMA": lambda: clip.TensorEMAClip(warmup_steps=2).clip_,
}


def run(rank: int, world_size: int, store: str) -> None:
    """Everything below, in a process group of `world_size` that meets at the file `store`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, init_method=f"file://{store}", timeout=timedelta(seconds=60)
    )
    try:
        check(init_device_mesh("cpu", (world_size,)))
    finally:
        dist.destroy_process_group()


def check(mesh: DeviceMesh) -> None:
    """All the promises, one after the other: two processes are slow to start."""
    for name in CLIPPERS:
        for dtype in (torch.float32, torch.bfloat16):
            sharded_is_whole(mesh, name, dtype)
        one_rank_is_enough_to_refuse(mesh, name)
    the_bits_are_torchs(mesh)
    two_meshes_in_one_call(mesh)
    fsdp(mesh)
    gradients_not_yet_summed(mesh)


def parameters(scale: float, seed: int, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    rng = torch.Generator().manual_seed(seed)
    made = []
    for shape, _ in LAYOUT:
        made.append(Parameter(torch.randn(shape, generator=rng).to(dtype)))
        made[-1].grad = (torch.randn(shape, generator=rng) * scale).to(dtype)
    return made


def spread(whole: list[Parameter], mesh: DeviceMesh) -> list[Parameter]:
    made = []
    for p, (_, placement) in zip(whole, LAYOUT, strict=True):
        on = (lambda t, at=placement: distribute_tensor(t, mesh, [at])) if placement else torch.clone
        made.append(Parameter(on(p.detach().clone())))
        made[-1].grad = on(p.grad.clone())
    return made


def gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_is_whole(mesh: DeviceMesh, name: str, dtype: torch.dtype) -> None:
    """Step by step, with an outlier: reports and gradients as if one process held everything."""
    tight: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    alone, together = CLIPPERS[name](), CLIPPERS[name]()
    clipped = False
    for seed, scale in enumerate((0.1, 0.12, 0.1, 0.11, 40.0, 0.1)):
        whole = parameters(scale, seed, dtype)
        parts = spread(whole, mesh)
        expected, report = alone(whole), together(parts)
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        assert all(r == report for r in reports), f"{name}: ranks disagree: {reports}"
        assert (report.clipped, report.finite) == (expected.clipped, expected.finite), (name, report, expected)
        close = 1e-5 if dtype == torch.float32 or name != "global norm" else 1e-2  # that one rounds as torch does
        assert math.isclose(report.norm_before, expected.norm_before, rel_tol=close), (name, report, expected)
        assert math.isclose(report.scale, expected.scale, rel_tol=10 * close), (name, report, expected)
        for p, q in zip(whole, parts, strict=True):
            torch.testing.assert_close(gathered(q.grad), p.grad, **tight)
        clipped |= report.clipped
    assert clipped, name


def one_rank_is_enough_to_refuse(mesh: DeviceMesh, name: str) -> None:
    """A NaN in the last row of a sharded matrix: only the last rank holds it, all leave their gradients alone."""
    whole = parameters(100.0, 0)
    whole[1].grad[-1, -1] = math.nan
    parts = spread(whole, mesh)
    report = CLIPPERS[name]()(parts)
    assert (report.scale, report.clipped, report.finite) == (0.0, False, False), (name, report)
    for p, q in zip(whole, parts, strict=True):
        torch.testing.assert_close(gathered(q.grad), p.grad, rtol=0, atol=0, equal_nan=True)


def the_bits_are_torchs(mesh: DeviceMesh) -> None:
    """Where torch can clip DTensors (one mesh, no plain tensor among them) nothing differs."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for max_norm in (0.3, 1e4):
            ours, theirs = (spread(parameters(2.0, 3, dtype), mesh)[:-1] for _ in range(2))
            norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
            report = clip.clip_global_norm_(ours, max_norm=max_norm)
            assert math.isclose(report.norm_before, gathered(norm).item(), rel_tol=1e-2 if dtype.itemsize == 2 else 0)
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a.grad.to_local(), b.grad.to_local()), (dtype, max_norm)


def gradients_not_yet_summed(mesh: DeviceMesh) -> None:
    """A Partial gradient is the sum over ranks: its norm is known, its elements and rows are not."""
    weight = Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    report = clip.clip_global_norm_([weight], max_norm=1.0)
    assert math.isclose(report.norm_before, 2.0 * mesh.size())
    torch.testing.assert_close(gathered(weight.grad), torch.full((4,), 0.5))
    for name in ("value", "per unit"):
        try:
            CLIPPERS[name]()([weight])
        except UnsupportedError:
            continue
        raise AssertionError(f"{name} took a Partial gradient")


def two_meshes_in_one_call(mesh: DeviceMesh) -> None:
    """Parts sharded one way, parts another, as with tensor or expert parallelism: torch's own clipping refuses that."""
    other = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("replicas", "shards"))
    for name in CLIPPERS:
        whole = parameters(5.0, 1)[1:3]
        parts = []
        for p, on, at in zip(whole, (mesh, other), ([Shard(0)], [Replicate(), Shard(1)]), strict=True):
            parts.append(Parameter(distribute_tensor(p.detach().clone(), on, at)))
            parts[-1].grad = distribute_tensor(p.grad.clone(), on, at)
        expected, report = CLIPPERS[name]()(whole), CLIPPERS[name]()(parts)
        assert math.isclose(report.norm_before, expected.norm_before, rel_tol=1e-5), (name, report, expected)
        for p, q in zip(whole, parts, strict=True):
            torch.testing.assert_close(gathered(q.grad), p.grad)


def fsdp(mesh: DeviceMesh) -> None:
    """The gradients of a model under fully_shard, against the same model whole."""
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for name in CLIPPERS:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)))
        fully_shard(models[1], mesh=mesh)
        for model in models:
            (model(x).square().mean() * 50).backward()
        expected, report = (CLIPPERS[name]()(list(model.parameters())) for model in models)
        assert math.isclose(report.norm_before, expected.norm_before, rel_tol=1e-4), (name, report, expected)
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert isinstance(q.grad, DTensor)
            torch.testing.assert_close(gathered(q.grad), p.grad, rtol=1e-4, atol=1e-6)
