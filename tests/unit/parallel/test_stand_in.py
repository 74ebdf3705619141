"""What a rank sends in place of a pass that failed; here alone with itself, which DDP does not mind."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steadystep.parallel import LastGroup, Once, ends_of
from steadystep.parallel.replicas import StandIn


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise MemoryError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.first, self.norm, self.last = (
            nn.Linear(2, 2),
            nn.Linear(2, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 1),
        )
        self.place = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        if self.place == "forward":
            raise MemoryError
        return self.last(Fails.apply(hidden) if self.place == "backward" else hidden)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(**options: Any) -> tuple[DistributedDataParallel, Net]:
    net = Net()
    if "find_unused_parameters" not in options:
        del net.unused
    return DistributedDataParallel(net, **options), net


def one_pass(model: DistributedDataParallel, net: Net) -> None:
    if net.place == "before":
        raise MemoryError
    out = model(torch.ones(4, 2) + torch.arange(4.0)[:, None])
    if net.place == "loss":
        raise MemoryError
    out.sum().backward()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("place", ["before", "forward", "loss", "backward"])
@pytest.mark.parametrize("earlier", [0, 2])
def test_the_wrapper_is_ready_for_the_next_pass(place: str, earlier: int, options: dict[str, Any]) -> None:
    model, net = made(**options)
    stand_in = StandIn(model)
    for _ in range(earlier):
        with stand_in.watching():
            one_pass(model, net)
        model.zero_grad()
    net.place = place
    with pytest.raises(MemoryError), stand_in.watching():
        one_pass(model, net)
    assert stand_in.is_possible
    stand_in.complete(reduced=True)
    used = [p for name, p in net.named_parameters() if "unused" not in name]
    assert all(p.grad is not None for p in used)
    assert all(not p.grad.any() for p in net.first.parameters())  # nothing of it was computed
    model.zero_grad()
    net.place = ""
    one_pass(model, net)  # DDP raises where a reduction was left unfinished
    assert all(p.grad.any() for p in net.last.parameters())
    assert not model._forward_pre_hooks
    assert "_run_ddp_forward" not in vars(model)


def test_a_pass_that_is_not_sent_needs_nothing_but_its_buffers() -> None:
    model, net = made()
    stand_in, sent = StandIn(model), []
    model._sync_buffers = lambda: sent.append(1)  # type: ignore[method-assign]
    net.place = "before"
    with model.no_sync(), pytest.raises(MemoryError), stand_in.watching():
        one_pass(model, net)
    stand_in.complete(reduced=False)
    assert (sent, net.first.weight.grad) == ([1], None)
    net.place = "forward"
    model.require_forward_param_sync = True
    with model.no_sync(), pytest.raises(MemoryError), stand_in.watching():
        one_pass(model, net)
    stand_in.complete(reduced=True)
    assert sent == [1, 1]  # by the pass itself
    assert model.require_forward_param_sync
    assert net.first.weight.grad is not None


@pytest.mark.parametrize("options", [{"static_graph": True}, {}])
def test_what_cannot_be_stood_in_for(options: dict[str, Any]) -> None:
    model, net = made(**options)
    assert StandIn(model).is_possible is not bool(options)
    net.norm = nn.SyncBatchNorm(4)
    assert not StandIn(model).is_possible
    assert not StandIn(None).is_possible


def test_a_model_that_is_called_past_its_wrapper() -> None:
    model, net = made()
    stand_in = StandIn(model)
    with stand_in.watching():
        net(torch.ones(4, 2)).sum().backward()
    assert not stand_in.is_possible


class Often(nn.Module):
    """Calls its layers in every forward pass; fails in the one that is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.calls, self.fails_at = 0, -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise MemoryError
        return self.last(self.norm(self.first(x)))


def sent_by(passes: list[tuple[int, bool]], calls: int, *, fails: tuple[int, int] | None) -> list[str]:
    """What a rank sends in passes of several calls: (calls, whether it is reduced); `fails` in a pass, at a call."""
    torch.manual_seed(0)
    net, sent = Often(), list[str]()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5)

    def reduced(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(f"bucket {bucket.index()}")
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, reduced)
    model._sync_buffers = lambda: sent.append("buffers")  # type: ignore[method-assign]
    stand_in = StandIn(model)
    for number, is_reduced in passes:
        net.calls, net.fails_at = 0, -1 if fails is None or fails[0] != number else fails[1]
        with nullcontext() if is_reduced else model.no_sync():
            try:
                with stand_in.watching():
                    if net.fails_at == 0:
                        raise MemoryError
                    sum(model(torch.randn(4, 2)) for _ in range(calls)).sum().backward()
            except MemoryError:
                pass
            else:
                continue
        stand_in.complete(reduced=is_reduced)
    return sent


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_rank_that_fails_sends_what_the_others_wait_for(calls: int, size: int) -> None:
    """Three updates of `size` micro-batches; one of the second or third fails on this rank at any of its calls."""
    passes = [(number, number % size == size - 1) for number in range(3 * size)]
    expected = sent_by(passes, calls, fails=None)
    assert {"buffers", "bucket 0", "bucket 1"} <= set(expected)
    for number in range(size, 3 * size):
        for call in range(calls + 1):
            assert sent_by(passes, calls, fails=(number, call)) == expected, (number, call)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_rank_that_fails_before_the_last_pass_sends_that_too(calls: int) -> None:
    """The others end their update with the pass that is reduced, and this rank with them."""
    net = Often()
    model, sent = DistributedDataParallel(net), list[str]()
    model._sync_buffers = lambda: sent.append("buffers")  # type: ignore[method-assign]
    stand_in = StandIn(model)
    with stand_in.watching():
        sum(model(torch.randn(4, 2)) for _ in range(calls)).sum().backward()
    model.zero_grad()
    sent.clear()
    with model.no_sync(), pytest.raises(MemoryError), stand_in.watching():
        raise MemoryError
    stand_in.complete(reduced=True)
    assert sent == ["buffers"] * calls  # with the first call, and after the first one that is reduced
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())
    assert model.require_backward_grad_sync


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mixed_precision", object()),
        ("buffer_hook", object()),
        ("_use_python_reducer", True),
        ("_delay_all_reduce_all_params", True),
    ],
)
def test_messages_of_other_kinds_cannot_be_stood_in_for(name: str, value: object) -> None:
    model, _ = made()
    assert StandIn(model).is_possible
    setattr(model, name, value)
    assert not StandIn(model).is_possible


def test_sparse_gradients_cannot_be_stood_in_for() -> None:
    dense, sparse = (DistributedDataParallel(nn.Embedding(3, 2, sparse=sparse)) for sparse in (False, True))
    assert StandIn(dense).is_possible
    assert not StandIn(sparse).is_possible


def test_a_parameter_that_the_wrapper_ignores_is_left_alone() -> None:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["first.weight", "unused.weight"])
    model = DistributedDataParallel(net, find_unused_parameters=True)
    stand_in = StandIn(model, own={id(net.first.weight), id(net.unused.weight)})
    with pytest.raises(MemoryError), stand_in.watching():
        raise MemoryError
    stand_in.complete(reduced=True)
    assert net.first.weight.grad is net.unused.weight.grad is None
    assert net.first.bias.grad is not None


def test_without_a_wrapper_nothing_is_watched() -> None:
    with StandIn(None).watching():
        pass


class Two:
    """Two ranks of which this is one; the other has `other` batches left."""

    def __init__(self, other: float) -> None:
        self.agreements, self.other, self.asked = 0, other, []

    def on_all(self, act: Any, when: Any) -> None:
        self.asked.append((act, when))

    def any_rank(self, wanted: Any) -> Any:
        return lambda: wanted() or self.other < 1

    def least(self, number: float) -> float:
        return min(number, self.other)

    def agree(self, size: int) -> None:
        self.agreements += 1
        for act, when in self.asked:
            if when() or self.other < size:
                act()


@pytest.mark.parametrize(
    ("mine", "theirs", "used"), [(7, 7, 7), (7, 6, 6), (5, 9, 5), (math.inf, 4, 4), (3, 3, 3), (8, 8, 8)]
)
def test_both_take_as_many_batches(mine: float, theirs: float, used: int) -> None:
    size, ranks = 3, Two(theirs)
    data = SimpleNamespace(left=mine, open=False)
    ends = ends_of(ranks, data, size)  # type: ignore[arg-type]
    assert isinstance(ends, LastGroup)
    ends()
    data.open, count = True, 0
    while count < 20:
        count += 1
        data.left, ranks.other = mine - count, theirs - count
        if count % size == 0:
            ranks.agree(size)
        if ends() or data.left <= 0:
            break
    assert count == used
    data.open = False
    assert not ends()


def test_of_one_batch_per_update_the_pass_ends_where_a_rank_has_none() -> None:
    for mine, theirs, ended in ((1, 1, False), (0, 1, True), (1, 0, True)):
        ranks, data = Two(theirs), SimpleNamespace(left=mine, open=True)
        ends = ends_of(ranks, data, 1)  # type: ignore[arg-type]
        assert isinstance(ends, Once)
        ranks.agree(1)
        assert ends() is ended
