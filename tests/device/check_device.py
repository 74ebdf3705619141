"""The test device keeps CUDA's rules; without this, nothing that runs on it would show anything."""

import copy
import math

import pytest
import torch
from torch import nn

from tests.device import notgpu

notgpu.register()
D = notgpu.DEVICE


def test_the_host_cannot_read_it_without_a_transfer() -> None:
    x = torch.arange(4.0, device=D)
    with pytest.raises(TypeError, match="can't convert notgpu:0 device type tensor to numpy"):
        x.numpy()
    with notgpu.counted() as counts:
        assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert x.sum().item() == 6.0
    assert (counts.to_host, counts.waits) == (2, 2)


def test_two_devices_do_not_mix_but_for_numbers() -> None:
    here, there = torch.ones(3), torch.ones(3, device=D)
    for mixed in (
        lambda: there + here,
        lambda: here.add_(there),
        lambda: torch.stack([there.sum(), here.sum()]),
        lambda: torch.cat([here, there]),
        lambda: nn.Linear(3, 2)(there),
        lambda: torch.zeros(()).add_(there.sum()),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert (there * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]


def test_a_copy_that_does_not_block_arrives_when_it_is_waited_for() -> None:
    target, source = torch.full((2,), math.nan), torch.ones(2, device=D)
    target.copy_(source, non_blocking=True)
    source.zero_()
    assert target.isnan().all()
    torch.accelerator.synchronize()
    assert target.tolist() == [1.0, 1.0]


def test_it_draws_its_own_random_numbers() -> None:
    torch.get_device_module(D).manual_seed(3)
    before = torch.get_rng_state()
    first = torch.rand(4, device=D)
    nn.functional.dropout(first)
    assert torch.equal(before, torch.get_rng_state())
    torch.get_device_module(D).manual_seed(3)
    assert torch.equal(first, torch.rand(4, device=D))


def test_views_share_memory_and_copies_do_not() -> None:
    x = torch.zeros(2, 3, device=D)
    x.t()[1].fill_(5.0)
    assert x[:, 1].tolist() == [5.0, 5.0]
    twin = copy.deepcopy(x)
    x.zero_()
    assert twin.sum().item() == 10.0
