"""Out of memory: the same batch again in smaller parts, and the same update."""

import copy
import gc
import json
import math
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from steadystep.errors import MisuseError, TrainingHalted
from steadystep.memory import Attempt, BatchPart, OutOfMemoryRetry, is_out_of_memory, split_batch, weighted_mean

pytestmark = pytest.mark.filterwarnings("ignore:steadystep. out of memory")


@pytest.fixture(autouse=True, scope="module")
def _quick_garbage_collection() -> Iterator[None]:
    """Each retry collects garbage; what the test process has loaded need not be looked through every time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Hungry(nn.Module):
    """Runs out of memory when given more than `fits` rows, in the forward or in the backward pass."""

    def __init__(self, fits: float, *, backward: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.fits, self.backward_too = fits, backward
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        hidden = self.layers[:3](self.norm(x))
        if len(x) > self.fits:
            if not self.backward_too:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            hidden.register_hook(self.run_out)
        return self.layers[3:](hidden)

    def run_out(self, _: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def hungry(fits: float, **kind: bool) -> Hungry:
    torch.manual_seed(0)
    return Hungry(fits, **kind)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def worker(model: nn.Module):
    def work(part: Tensor, weight: float) -> Tensor:
        loss = loss_of(model, part)
        (loss * weight).backward()
        return loss.detach()

    return work


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def run(model: Hungry, retry: OutOfMemoryRetry, batch: Tensor, attempt: Attempt | None = None) -> Tensor:
    with attempt or Attempt(model) as trying:
        return weighted_mean(retry.run(worker(model), batch, undo=trying.undo))


@settings(max_examples=40)
@given(count=st.integers(1, 20), fits=st.integers(1, 20), backward=st.booleans(), earlier=st.booleans())
def test_the_gradients_are_those_of_the_whole_batch(count: int, fits: int, backward: bool, earlier: bool) -> None:
    model, whole = hungry(fits, backward=backward), hungry(math.inf)
    batch = rows(count)
    for m in (model, whole) if earlier else ():  # gradients of a micro-batch before are not lost
        loss_of(m, rows(1, seed=9)).backward()
    expected = loss_of(whole, batch)
    expected.backward()
    retry = OutOfMemoryRetry()
    got = run(model, retry, batch)
    torch.testing.assert_close(got, expected.detach())
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
        if count <= fits:
            assert torch.equal(p.grad, q.grad)  # not in parts: bit for bit
    assert retry.size is None if count <= fits else retry.size <= fits


def test_it_halves_until_it_fits_and_starts_there_next_time() -> None:
    model = hungry(3)
    retry = OutOfMemoryRetry()
    with pytest.warns(UserWarning, match=r"16 rows in 8 parts of at most 2"):
        run(model, retry, rows(16))
    assert model.sizes == [16, 8, 4, *[2] * 8]
    assert (retry.size, retry.retries) == (2, 3)
    model.sizes.clear()
    run(model, retry, rows(7))
    run(model, retry, rows(2))
    assert model.sizes == [2, 2, 2, 1, 2]


def test_a_batch_that_fits_is_not_looked_into() -> None:
    def split(batch: object, parts: int) -> list:
        raise AssertionError

    given = []
    retry = OutOfMemoryRetry(split=split)
    assert retry.run(lambda batch, weight: given.append((batch, weight)), "anything", undo=lambda: None) == [
        (None, 1.0)
    ]
    assert given == [("anything", 1.0)]


def pairs(batch: Tensor, parts: int) -> list[BatchPart]:
    """Rows that belong together in twos, as BatchNorm needs them."""
    twos = split_batch(batch.reshape(len(batch) // 2, 2, -1), parts)
    return [BatchPart(batch=part.batch.flatten(0, 1), weight=part.weight, size=part.size) for part in twos]


def test_at_a_single_row_it_gives_up_and_nothing_is_left_behind() -> None:
    model = hungry(1, backward=True, norm=True)
    model.layers[0].weight.grad = torch.ones(8, 4)
    before = [b.clone() for b in model.buffers()] + [torch.get_rng_state()]
    with pytest.raises(TrainingHalted, match="single row: CUDA out of memory") as caught:
        run(model, OutOfMemoryRetry(split=pairs), rows(8))
    assert "checkpoint_blocks" in caught.value.try_next
    assert caught.value.step == 0
    assert model.sizes == [8, 4, 2]
    assert torch.equal(model.layers[0].weight.grad, torch.ones(8, 4))
    assert all(p.grad is None for p in [*model.parameters()][1:])
    assert all(torch.equal(a, b) for a, b in zip(before, [*model.buffers(), torch.get_rng_state()], strict=True))


def test_a_batch_that_cannot_be_split_says_both_things() -> None:
    model = hungry(0)
    with pytest.raises(TrainingHalted, match=r"Tried to allocate 2.00 GiB; and nothing in this batch") as caught:
        OutOfMemoryRetry().run(lambda *_: model(rows(2)), None, undo=model.zero_grad, step=41)
    assert caught.value.step == 41


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), RuntimeError("device-side assert")])
def test_other_errors_pass_with_the_attempt_undone(error: BaseException) -> None:
    model = hungry(9)
    undone = []

    def work(part: Tensor, weight: float) -> None:
        raise error

    with pytest.raises(type(error)):
        OutOfMemoryRetry().run(work, rows(4), undo=lambda: undone.append(1))

    def interrupted() -> None:
        with Attempt(model):
            loss_of(model, rows(2)).backward()
            raise error

    with pytest.raises(type(error)):
        interrupted()
    assert undone == [1]
    assert all(p.grad is None for p in model.parameters())


def test_dropout_and_buffers_start_each_attempt_from_the_same_state() -> None:
    drawn = []
    model = hungry(4, backward=True, norm=True)

    def work(part: Tensor, weight: float) -> Tensor:
        drawn.append((torch.rand(1).item(), model.norm.num_batches_tracked.item()))
        return worker(model)(part, weight)

    with Attempt(model) as attempt:
        OutOfMemoryRetry().run(work, rows(8), undo=attempt.undo)
    assert drawn[0] == drawn[1]
    assert [tracked for _, tracked in drawn] == [0, 0, 1]
    assert model.norm.num_batches_tracked == 2


def test_the_memory_of_a_failed_attempt_is_free_before_the_next() -> None:
    alive: list[weakref.ref] = []
    model = hungry(2)

    def work(part: Tensor, weight: float) -> Tensor:
        gc.disable()  # what is gone must be gone without luck
        try:
            assert [r() for r in alive] == [None] * len(alive)
        finally:
            gc.enable()
        activations = part * 2
        if len(part) > 2:
            alive.append(weakref.ref(activations))
        return loss_of(model, activations).detach()

    OutOfMemoryRetry().run(work, rows(8), undo=model.zero_grad)
    assert len(alive) == 2


def test_parts_that_count_nothing_are_not_run() -> None:
    batch = {"x": rows(8), "on": torch.tensor([True] * 4 + [False] * 4)}
    sizes = []

    def work(part: dict, weight: float) -> None:
        sizes.append((len(part["x"]), weight))
        if len(part["x"]) > 4:
            raise torch.OutOfMemoryError("out of memory")

    retry = OutOfMemoryRetry(split=lambda b, n: split_batch(b, n, count=lambda part: part["on"].sum()))
    retry.run(work, batch, undo=lambda: None)
    assert sizes == [(8, 1.0), (4, 1.0)]


def real_cpu_error() -> RuntimeError:
    try:
        torch.empty(2**50)
    except RuntimeError as error:
        return error
    raise AssertionError


def test_what_counts_as_out_of_memory() -> None:
    assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
    assert is_out_of_memory(torch.OutOfMemoryError("anything"))
    assert is_out_of_memory(real_cpu_error())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_real_error_of_the_cpus_allocator_is_retried() -> None:
    sizes = []

    def work(part: Tensor, weight: float) -> None:
        sizes.append(len(part))
        if len(part) > 2:
            torch.empty(2**50)

    OutOfMemoryRetry().run(work, rows(4), undo=lambda: None)
    assert sizes == [4, 2, 2]


@settings(max_examples=20)
@given(cut=st.integers(0, 3), fits=st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_resume_is_invisible(cut: int, fits: list[int]) -> None:
    def play(retry: OutOfMemoryRetry, limits: list[int]) -> list:
        seen = []
        for limit in limits:
            model = hungry(limit)
            run(model, retry, rows(6))
            seen.append((model.sizes, json.dumps(retry.state_dict())))
        return seen

    first, second = OutOfMemoryRetry(), OutOfMemoryRetry()
    expected = play(OutOfMemoryRetry(), fits)
    got = play(first, fits[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert got + play(second, fits[cut:]) == expected


class Ranks:
    """`agree` among threads, as an all-reduce of the maximum is among processes."""

    def __init__(self, count: int) -> None:
        self._numbers = [0] * count
        self._barrier = Barrier(count, timeout=20)

    def agree(self, rank: int, number: int) -> int:
        self._numbers[rank] = number
        self._barrier.wait()
        largest = max(self._numbers)
        self._barrier.wait()
        return largest

    def all(self, work) -> list:
        with ThreadPoolExecutor(len(self._numbers)) as pool:
            return [f.result() for f in [pool.submit(work, rank) for rank in range(len(self._numbers))]]


def test_ranks_choose_the_same_number_of_parts() -> None:
    ranks = Ranks(3)
    whole = hungry(math.inf)

    def rank(number: int) -> list[int]:
        model = copy.deepcopy(whole)
        model.fits = [2, 100, 5][number]
        retry = OutOfMemoryRetry(agree=lambda parts: ranks.agree(number, parts))
        sizes = []
        for count in (8, 8 if number else 4):  # the second time the ranks hold different numbers of rows
            model.zero_grad()
            run(model, retry, rows(count))
            sizes.append(list(model.sizes))
            model.sizes.clear()
            expected = torch.autograd.grad(loss_of(whole, rows(count)), [*whole.parameters()])
            torch.testing.assert_close([p.grad for p in model.parameters()], [*expected])
        return sizes

    first, second, third = ranks.all(rank)
    assert first == [[8, 4, 2, 2, 2, 2], [1, 1, 1, 1]]
    assert second == third == [[8, 4, 4, 2, 2, 2, 2], [2, 2, 2, 2]]


def test_ranks_give_up_together() -> None:
    ranks = Ranks(2)

    def rank(number: int) -> str:
        model = hungry([0, 100][number])
        retry = OutOfMemoryRetry(agree=lambda parts: ranks.agree(number, parts))
        with pytest.raises(TrainingHalted) as caught:
            run(model, retry, rows(2))
        assert all(p.grad is None for p in model.parameters())
        return caught.value.what

    failed, other = ranks.all(rank)
    assert failed.startswith("out of memory with a single row")
    assert other.startswith("another rank")


def test_an_agreement_on_less_than_was_asked_for_is_none() -> None:
    with pytest.raises(MisuseError, match="largest number of all ranks"):
        OutOfMemoryRetry(agree=lambda _: 0).run(lambda *_: None, rows(2), undo=lambda: None)
