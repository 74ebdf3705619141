"""Tensors inside any kind of batch: opened and rebuilt."""

from collections import OrderedDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from steadystep._utils.tree import DEEPEST, children, copied, held_in, mapped, rebuilt, tensors_in
from steadystep.errors import MisuseError


class Pair(NamedTuple):
    """A named tuple of two."""

    x: Tensor
    y: Any


@dataclass(frozen=True)
class Held:
    """A dataclass that `replace()` refuses."""

    x: Tensor
    made: Any = field(init=False, default="kept")


def test_each_container_is_rebuilt_in_its_own_class() -> None:
    one = torch.ones(2)
    tree = [Pair(one, "y"), Held(one), OrderedDict(b=(one,), a=None), MappingProxyType({"k": [one]})]
    twice = mapped(tree, lambda tensor: tensor * 2)
    assert [type(part) for part in twice] == [Pair, Held, OrderedDict, dict]
    assert list(twice[2]) == ["b", "a"]
    assert twice[0].y == "y"
    assert twice[1].made == "kept"
    assert [tensor.tolist() for _, tensor in tensors_in(twice)] == [[2.0, 2.0]] * 4
    assert [name for name, _ in tensors_in(twice)] == ["[0][0]", "[1].x", "[2]['b'][0]", "[3]['k'][0]"]
    assert one.tolist() == [1.0, 1.0]  # and the one given is as it was
    assert tree[1].x is one  # type: ignore[attr-defined]


@pytest.mark.parametrize("thing", ["text", b"bytes", 3, None, {1, 2}, Held])
def test_what_is_no_container_stays(thing: object) -> None:
    assert children(thing) is None
    assert mapped(thing, lambda _: None) is thing


def test_a_container_that_holds_itself_has_an_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(MisuseError, match=f"more than {DEEPEST} levels deep"):
        mapped(loop, lambda tensor: tensor)


class NoUpdate(dict[str, Any]):
    """As the outputs of transformers are."""

    def update(self, *_: Any, **__: Any) -> None:
        """Refused."""
        raise TypeError("no update()")


def test_a_mapping_that_refuses_update_is_rebuilt_by_its_keys() -> None:
    assert rebuilt(NoUpdate(a=1), [2]) == {"a": 2}


def test_rebuilding_keeps_the_order_of_the_parts() -> None:
    assert rebuilt({"a": 1, "b": 2}, [3, 4]) == {"a": 3, "b": 4}
    assert rebuilt((1, 2), [3, 4]) == (3, 4)


class Plain:
    """An object with a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_only_containers_are_opened_where_objects_are_not_asked_for() -> None:
    one, array = torch.ones(2), np.ones(2)
    tree = {"a": [one, one], "b": Plain(one), "c": Held(one), "d": (array,)}
    assert [part is one for part in held_in(tree)] == [True] * 3
    assert len(list(held_in(tree, (Tensor, np.ndarray)))) == 4
    assert len(list(tensors_in(tree))) == 4
    holds_itself: list[Any] = [one]
    holds_itself.append(holds_itself)
    assert len(list(held_in(holds_itself))) == 1


def test_things_of_another_kind_are_replaced_and_tensors_stay() -> None:
    one, plain = torch.ones(2), Plain(torch.zeros(1))
    made = mapped((one, {"k": plain}), lambda thing: thing.x, Plain)
    assert made[0] is one
    assert made[1]["k"] is plain.x


def test_a_copy_shares_no_tensor_and_no_container() -> None:
    state = OrderedDict(a=[torch.ones(2, requires_grad=True)], b=Plain(torch.ones(1)))
    twin = copied(state)
    assert type(twin) is OrderedDict
    assert twin["a"] is not state["a"]
    assert not twin["a"][0].requires_grad
    assert twin["a"][0].data_ptr() != state["a"][0].data_ptr()
    assert twin["b"] is state["b"]
