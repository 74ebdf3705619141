"""Checkpoints of several ranks: written together, read together, by as many ranks or by others."""

import hashlib
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import steadystep
from tests.distributed.setting import (
    assert_replicas,
    assert_same,
    batch,
    everywhere,
    made,
    squared,
    tensors_of,
)

CONFIG = {"monitoring": {"save_checkpoints": True, "checkpoint_frequency": 1000}}


def with_dropout() -> nn.Module:
    """Random numbers of its own on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 15), nn.Dropout(0.2), nn.BatchNorm1d(15), nn.ReLU(), nn.Linear(15, 1))
    torch.manual_seed(100 + (dist.get_rank() if dist.is_initialized() else 0))
    return model


def steps(guard: steadystep.Guard, model: nn.Module, until: int) -> None:
    for step in range(guard.attempts, until):
        guard.step(lambda x: squared(model, x), batch=batch(step, dist.get_rank()))


def fingerprint(model: nn.Module) -> str:
    """Of the whole weights, whoever holds which part."""
    digest = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        digest.update(name.removeprefix("module.").encode() + whole.detach().numpy().tobytes())
    return digest.hexdigest()


def resuming(kind: str, folder: Path) -> None:
    """Stopped after 10 steps and gone on by another guard, or never stopped: the same bits on every rank."""
    model, optimizer = made(kind, with_dropout)
    guard = steadystep.Guard(model, optimizer, run_dir=folder / f"{kind}-whole", config=CONFIG)
    steps(guard, model, 16)
    guard.close()
    whole = tensors_of(model, optimizer)

    model, optimizer = made(kind, with_dropout)
    guard = steadystep.Guard(model, optimizer, run_dir=folder / kind, config=CONFIG)
    steps(guard, model, 8)
    guard.save()
    steps(guard, model, 10)
    guard.close()
    if dist.get_rank() == 0:
        kept = sorted(p.name for p in (folder / kind / "checkpoints").iterdir())
        assert kept == ["step-00000008", "step-00000010"], kept
        assert (folder / kind / "run.jsonl").read_text().count('"kind": "start"') == 1

    model, optimizer = made(kind, lambda: with_dropout().double().float())
    with torch.no_grad():
        next(iter(model.parameters())).mul_(3.0)
    guard = steadystep.Guard.resume(model, optimizer, run_dir=folder / kind, config=CONFIG)
    assert guard.attempts == 10
    steps(guard, model, 12)
    guard.save()
    steps(guard, model, 16)
    assert_same(whole, tensors_of(model, optimizer))
    path = guard.save(folder / f"{kind}-end")
    (folder / f"{kind}.txt").write_text(fingerprint(model))
    assert path.name == "step-00000016"
    guard.close()


def damaged(kind: str, folder: Path) -> None:
    """The newest lacks a byte of one rank's file: all ranks take the one before."""
    path = folder / kind / "checkpoints"
    if dist.get_rank() == 0:
        newest = max(path.iterdir())
        victim = sorted(newest.rglob("*.safetensors"))[-1]
        raw = bytearray(victim.read_bytes())
        raw[-1] ^= 1
        victim.write_bytes(bytes(raw))
        (path / ".step-00000099.abc.parts").mkdir()  # what a killed run leaves
    dist.barrier()
    model, optimizer = made(kind, with_dropout)
    guard = steadystep.Guard.resume(model, optimizer, run_dir=folder / kind, config=CONFIG)
    assert everywhere(guard.attempts) == [12] * dist.get_world_size()
    assert not list(path.glob(".*"))
    guard._end(save=False)


def stopping(kind: str, folder: Path) -> None:
    """One rank is asked to stop: all save and stop after the same step."""
    model, optimizer = made(kind, with_dropout)
    guard = steadystep.Guard(model, optimizer, run_dir=folder / f"{kind}-stopped", config=CONFIG)
    steps(guard, model, 3)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        steps(guard, model, 9)
    dist.barrier()
    assert everywhere(guard.attempts) == [4] * dist.get_world_size()
    assert (folder / f"{kind}-stopped" / "checkpoints" / "step-00000004" / "manifest.json").exists()
    guard._end(save=False)


def reading(kind: str, folder: Path) -> None:
    """Onto another number of ranks, and from one kind to the other."""
    for saved in ("ddp", "fsdp"):
        model, optimizer = made(kind, with_dropout)
        guard = steadystep.Guard.resume(
            model, optimizer, run_dir=folder / f"{saved}-as-{kind}", path=folder / f"{saved}-end"
        )
        assert guard.attempts == 16
        assert fingerprint(model) == (folder / f"{saved}.txt").read_text()
        states = everywhere(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest())
        assert len(set(states)) == len(states), "ranks with the same random numbers"
        steps(guard, model, 20)
        if kind == "ddp":
            assert_replicas(model, optimizer)
        guard.close()


WRITE = {"resuming": resuming, "damaged": damaged, "stopping": stopping}
READ = {"reading": reading}
