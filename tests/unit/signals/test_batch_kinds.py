"""Batches of any kind: what cannot be read is not looked at, and looking at one never costs a step."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import steadystep
from steadystep._utils.tree import tensors_in
from steadystep.signals.batches import Inputs, batch_is_finite, batch_rms
from tests.loops import assert_same, full_state

X = torch.full((4, 3), 2.0)
IDS = torch.tensor([[3, 4]])


@dataclasses.dataclass(slots=True, frozen=True)
class Record:
    name: str
    x: Any


class Graph:
    """As graph libraries make them: a store behind `__getattr__`, and it can be called."""

    def __init__(self, **held: Any) -> None:
        self.__dict__["_store"] = collections.UserDict(held)

    def __getattr__(self, name: str) -> Any:
        return self._store[name]

    def __call__(self, *_: str) -> Iterator[Any]:
        yield from self._store.items()


class Lazy(Mapping[str, Any]):
    """A mapping whose file is gone."""

    def __getitem__(self, key: str) -> Any:
        raise OSError("gone")

    def __iter__(self) -> Iterator[str]:
        raise OSError("gone")

    def __len__(self) -> int:
        return 1


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("do not touch")


class Stubborn(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("no operations")


def circle() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


def jagged(*rows: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def generator() -> Iterator[Tensor]:
    yield X


SIZE_OF_X, SIZE_OF_IDS = 2.0, math.log1p(math.sqrt(12.5))
KINDS: dict[str, tuple[Callable[[], Any], float | None]] = {
    "token ids with a count": (lambda: {"input_ids": IDS, "num_items_in_batch": torch.tensor(2)}, SIZE_OF_IDS),
    "a count first": (lambda: {"num_items_in_batch": torch.tensor(2), "input_ids": IDS}, SIZE_OF_IDS),
    "0-d": (lambda: torch.tensor(3.0), None),
    "many 0-d": (lambda: [torch.tensor(i) for i in range(300)], None),
    "a number": (lambda: 3, None),
    "text and None": (lambda: ("text", None, b"bytes", {"y": [X]}), SIZE_OF_X),
    "empty": (lambda: [torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), [], {}], None),
    "sparse": (lambda: (torch.eye(3).to_sparse(), X), SIZE_OF_X),
    "ragged": (lambda: [torch.zeros(0), torch.full((5,), 2.0), torch.ones(3)], SIZE_OF_X),
    "ragged lists": (lambda: [[1, 2], [3]], None),
    "nested": (lambda: (jagged(torch.ones(3), torch.ones(5)), X), SIZE_OF_X),
    "packed": (lambda: nn.utils.rnn.pack_sequence([X, X[:2]]), SIZE_OF_X),
    "dataclass": (lambda: Record("a", X), SIZE_OF_X),
    "graph": (lambda: Graph(edge_index=torch.zeros(2, 5, dtype=torch.long), x=X), SIZE_OF_X),
    "lazy mapping": (Lazy, None),
    "hostile": (lambda: [Hostile(), X], SIZE_OF_X),
    "stubborn tensor": (lambda: X.as_subclass(Stubborn), None),
    "holds itself": (circle, None),
    "generator": (generator, None),
    "array": (lambda: np.ones((3, 3)), None),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64), None),
    "fp8": (lambda: torch.ones(3, 3).to(torch.float8_e4m3fn), None),
    "meta": (lambda: torch.empty(3, 3, device="meta"), None),
    "a module": (lambda: nn.Linear(2, 2), None),
    "a function": (lambda: print, None),
}


def run(make: Callable[[], Any] | None, folder: Path) -> dict[str, Tensor]:
    """Six steps, the fourth with a NaN: with a guard that is given batches, or (None) plainly without the fourth."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    guard = None if make is None else steadystep.Guard(model, optimizer, run_dir=folder)
    for step in range(6):

        def loss(_: Any, step: int = step) -> Tensor:
            return (model(X) - step).square().mean() * (math.nan if step == 3 else 1.0)

        if guard is not None and make is not None:
            assert guard.step(loss, batch=make()).stepped == (step != 3)
        elif step != 3:
            optimizer.zero_grad()
            loss(None).backward()
            optimizer.step()
    if guard is not None:
        guard.close()
    return full_state(model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_any_batch(kind: str, tmp_path: Path) -> None:
    make, size = KINDS[kind]
    found = batch_rms(make())
    assert (None if found is None else float(found)) == (None if size is None else pytest.approx(size))
    assert_same(run(None, tmp_path), run(make, tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_watch_is_told_of_any_batch(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with steadystep.watch(model, optimizer) as watcher:
        for factor in (1.0, math.nan, 1.0):
            optimizer.zero_grad()
            watcher.loss(model(X).square().mean() * factor, batch=KINDS[kind][0]()).backward()
            optimizer.step()
            assert watcher.outcome is not None
            assert watcher.outcome.stepped == math.isfinite(factor)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "batch", [torch.ones(100_000, 3), torch.ones(100_000, 3, dtype=torch.long), {"x": [X] * 10**5}]
)
def test_what_it_costs_does_not_grow_with_the_rows(batch: Any) -> None:
    import torch.distributed.tensor  # noqa: F401  # where it is loaded, each tensor is asked whether it is one of them

    with Counting() as counting:
        batch_rms(batch)
    assert counting.calls < 12


def test_the_first_batches_are_looked_at_wherever_the_tensor_is() -> None:
    inputs = Inputs()
    for batch in (Graph(x=X), Record("a", X), Lazy(), X):
        inputs.add(batch)
    (pending,) = inputs.waiting
    found = inputs.read(pending.tolist())
    assert found is not None
    assert (found.batches, found.mean) == (3, 2.0)


def test_a_nan_is_found_wherever_it_is() -> None:
    bad = torch.tensor([1.0, math.nan])
    for batch in (
        Graph(x=bad),
        Record("a", [bad]),
        jagged(torch.ones(2), bad),
        bad.to_sparse(),
        {"a": (X, Graph(y=bad))},
    ):
        assert batch_is_finite(batch) is False
    assert batch_is_finite(Graph(x=X)) is True
    assert batch_is_finite([Lazy(), Hostile(), IDS]) is None
    assert [name for name, _ in tensors_in({"a": (X, Graph(y=X))}, "batch")] == [
        "batch['a'][0]",
        "batch['a'][1]._store['y']",
    ]


def test_ids_have_no_scale() -> None:
    """One example per batch: an id of 2,000,000 after many below 1,000 is a healthy batch."""
    torch.manual_seed(0)
    model = nn.Embedding(8, 1)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for step in range(60):
        ids = torch.tensor([2_000_000 if step == 50 else 1 + step % 7])
        assert guard.step(lambda ids: (model(ids % 8) - 1.0).square().mean(), batch=ids).stepped
