"""What is packed comes back as it was: the same values, bit for bit, of the same types."""

import json
import math
import random
import struct
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from steadystep.checkpoints.atomic_io import Spread
from steadystep.checkpoints.packing import Packed, pack, unpack
from steadystep.errors import CheckpointError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.complex64, torch.complex128),
]


def there_and_back(state: Any) -> Any:
    packed = pack(state)
    text = json.dumps(packed.tree, allow_nan=False)
    return unpack(Packed(json.loads(text), packed.tensors))


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return (left.dtype, left.shape, bits(left)) == (right.dtype, right.shape, bits(right))
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, dict):
        return len(left) == len(right) and all(map(same, left.items(), right.items()))
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, set | frozenset):
        return sorted(map(repr, left)) == sorted(map(repr, right))
    return bool(left == right)


def surrogates_too() -> st.SearchStrategy[str]:
    return st.text(st.characters(), max_size=5) | st.text(st.sampled_from("\ud800\udc00$a"), max_size=4)


atoms = st.none() | st.booleans() | st.integers() | st.integers(2**52, 2**54) | st.floats() | surrogates_too()
keys = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=3)
leaves = (
    atoms
    | st.binary(max_size=6)
    | st.complex_numbers()
    | st.sampled_from([torch.float16, torch.device("cuda:1"), torch.device("cpu"), torch.Size([2, 0]), torch.Size([])])
    | st.sampled_from([np.float32(0.1), np.int64(7), np.bool_(True), np.float64("nan"), np.str_("a\0"), np.bytes_(b"")])
    | st.builds(lambda x, dtype: torch.tensor(x, dtype=dtype), st.lists(st.integers(0, 1)), st.sampled_from(DTYPES))
    | st.builds(np.array, st.lists(st.floats(width=32)), st.sampled_from(["<f4", ">f8", "U9", "S30", "complex64"]))
    | st.sets(keys, max_size=3)
    | st.frozensets(keys, max_size=3)
    | st.builds(Counter, st.text(max_size=4))
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 5))
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.just("$"), inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(lambda items: defaultdict(list, items))
    ),
    max_leaves=12,
)


@given(states)
def test_any_state_comes_back_as_it_was(state: Any) -> None:
    assert same(there_and_back(state), state)


@pytest.mark.parametrize(
    "state",
    [
        *(
            5,
            2**60,
            0.1,
            -math.inf,
            1 + 2j,
            "a",
            "\ud800",
            b"\x00a",
            (1, "b"),
            {1, 2},
            frozenset({"c"}),
            {1: 2, "d": (3,)},
        ),
        *(
            deque([1, 2], 2),
            deque([1, 2]),
            OrderedDict([("b", 1), ("a", 2)]),
            Counter("aab"),
            defaultdict(None, {"a": 1}),
        ),
        *(
            defaultdict(list, {"a": [1]}),
            defaultdict(int, {2: 3}),
            torch.Size([2, 3]),
            torch.bfloat16,
            torch.device("cuda:1"),
        ),
        *(torch.arange(3), torch.complex(torch.ones(2), torch.zeros(2)), np.float32(0.1), np.arange(4).reshape(2, 2)),
    ],
    ids=str,
)
def test_one_of_each_kind_comes_back(state: Any) -> None:
    back = there_and_back([state])[0]
    assert type(back) is type(state)
    assert same(back, state)
    assert getattr(back, "default_factory", None) is getattr(state, "default_factory", None)


def test_numbers_are_exact_in_strict_json() -> None:
    state = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 2**53, -(2**53), 2**53 - 1, 10**5000, True, 1, 1.0]
    assert same(there_and_back(state), state)
    assert max(abs(n) for n in pack(state).tree if isinstance(n, int)) < 2**53  # what a double holds


def test_what_json_has_a_form_for_is_written_in_it() -> None:
    state = {"a": [0, -5, 2**53 - 1, 1 - 2**53, 0.5, True, None, "b"]}
    assert pack(state).tree == state
    assert pack({"a": 2**53}).tree != {"a": 2**53}


def test_texts_keys_and_lengths_that_json_would_change() -> None:
    state = ["\ud800\udc00", {"$": "tensor", "v": "x"}, {1: 2, "1": 3, (1, None): 4, 2.5: 5, False: 6}]
    state += [np.str_("a\0"), np.bytes_(b"a\0")]
    assert same(there_and_back(state), state)
    assert there_and_back(deque([1], 5)).maxlen == 5


def test_tensors_of_every_dtype() -> None:
    shapes = [(), (0,), (3,), (2, 0, 3), (2, 3)]
    state = {(str(dtype), shape): torch.randint(0, 2, shape).to(dtype) for dtype in DTYPES for shape in shapes}
    back = there_and_back(state)
    assert [key for key in state if not same(back[key], state[key])] == []


def test_tensors_that_are_views() -> None:
    base = torch.randn(4, 6)
    turned = torch.randn(3, 2, dtype=torch.complex64)
    state = {"t": base.t(), "part": base[1:3, ::2], "wide": torch.ones(1).expand(5), "conj": turned.conj()}
    state["neg"] = turned.conj().imag
    back = there_and_back(state)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_tied_tensors_are_kept_once_and_stay_tied() -> None:
    weight = nn.Parameter(torch.randn(3))
    packed = pack({"a": weight, "b": weight.detach(), "other": weight[:2], "twin": weight.detach().clone()})
    assert list(packed.tensors) == ["a", "other", "twin"]
    back = unpack(packed)
    assert back["a"].data_ptr() == back["b"].data_ptr()
    assert torch.equal(back["twin"], weight)
    assert type(back["a"]) is Tensor


def test_a_tensor_and_its_conjugate_are_not_the_same() -> None:
    z = torch.tensor([1 + 2j])
    back = there_and_back([z, z.conj(), z.imag, z.conj().imag])
    assert [x.tolist() for x in back] == [[1 + 2j], [1 - 2j], [2.0], [-2.0]]


def test_random_states_of_python_numpy_and_torch() -> None:
    generator = np.random.default_rng(3)
    state = [random.getstate(), np.random.get_state(), generator.bit_generator.state, torch.get_rng_state()]
    back = there_and_back(state)
    assert same(back, state)
    expected = random.random(), generator.random()
    random.setstate(back[0])
    generator.bit_generator.state = back[2]
    assert (random.random(), generator.random()) == expected


def test_states_of_modules_optimizers_and_schedulers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9])  # it holds a Counter
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    back = there_and_back(state)
    assert same(back, state)
    assert back["model"]._metadata == state["model"]._metadata
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    scheduler.load_state_dict(back["scheduler"])


def test_names_of_tensors_can_be_read_and_never_meet() -> None:
    one, two = torch.tensor(1), torch.tensor(2)
    state = {"a": {"b": one}, "a.b": two, "__metadata__": one.clone(), "l": [one.clone()], "\ud800": two.clone()}
    packed = pack(state)
    assert list(packed.tensors) == ["a.b", "a.b~2", "__metadata__~2", "l[0]", "['\\ud800']"]
    assert same(unpack(packed), state)


def test_arrays_can_be_written_to() -> None:
    frozen = np.arange(3)
    frozen.flags.writeable = False
    back = there_and_back({"a": frozen, "f": np.asfortranarray(np.eye(2, 3)), "t": np.array(["2020-01-01"], "M8[D]")})
    back["a"][0] = 9
    assert back["a"].tolist() == [9, 1, 2]
    assert back["f"].shape == (2, 3)
    assert str(back["t"][0]) == "2020-01-01"


class Odd(dict):  # type: ignore[type-arg]
    pass


REFUSED: list[tuple[Any, str]] = [
    ({"kept": {"ema": {"foo": [0, 1, 2, threading.Lock()]}}}, r"^kept\.ema\.foo\[3\] is a _thread\.lock: save its"),
    ({"a": {3: lambda: 0}}, r"^a\[3\] is a function"),
    (object(), r"^the state is a object"),
    ({"x": Odd()}, r"^x is a .*test_packing.Odd"),
    ({"d": defaultdict(lambda: 0)}, r"^d is a collections.defaultdict: its default .* is code; save dict"),
    ({"g": torch.Generator()}, r"^g is a torch.*Generator: save its get_state"),
    ({"m": torch.empty(2, device="meta")}, r"^m is a .*Tensor: .* on meta"),
    ({"s": torch.eye(2).to_sparse()}, r"^s is a .*Tensor: torch.sparse_coo"),
    (
        {"q": torch.empty(2, dtype=torch.float8_e8m0fnu)},
        r"^q is a .*: safetensors cannot store torch.float8_e8m0fnu",
    ),
    ({"n": nn.UninitializedParameter()}, r"^n is a .*UninitializedParameter"),
    ({"o": np.array([None])}, r"^o is a numpy.ndarray"),
    ({"v": np.zeros(1, "i4,f4")}, r"^v is a numpy.ndarray"),
    ({"k": {(1, torch.ones(1)): 2}}, r"^the key of k\[.*\]\[1\] is a torch.Tensor: keys and sets"),
    ({"s": {torch.float32, b"", torch.ones(1)}}, r"keys and sets may hold only"),
]


def test_what_has_no_form_is_named_with_its_place() -> None:
    for state, message in REFUSED:
        with pytest.raises(CheckpointError, match=message):
            pack(state)


def test_a_container_that_contains_itself() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(CheckpointError, match=r"nested more than 100 levels deep"):
        pack({"ring": ring})
    deep: Any = 1
    for _ in range(90):
        deep = {1: (deep,)} if _ % 2 else [deep]
    with pytest.raises(CheckpointError, match="deep"):
        pack(deep)


def test_as_deep_as_allowed_goes_through_json() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {1: deep}
    assert there_and_back(deep) == deep


FOREIGN: list[Any] = [
    {"$": "os.system", "v": "true"},
    {"$": ["list"], "v": 1},
    {"$": "tensor", "v": "missing"},
    {"$": "tensor"},
    {"$": "int", "v": 3},
    {"$": "bytes", "v": "?"},
    {"$": "set", "v": [[]]},
    {"$": "dict", "v": [[1]]},
    {"$": "dtype", "v": "load"},
    {"$": "device", "v": "no such"},
    {"$": "Size", "v": ["x"]},
    {"$": "defaultdict", "v": {}, "factory": "eval"},
    {"$": "array", "v": "t", "dtype": "O", "shape": [1]},
    {"$": "array", "v": "t", "dtype": "<f4", "shape": [2**40]},
    {"$": "array", "v": "t", "dtype": "()", "shape": []},
    {"$": "array", "v": "t", "dtype": "V8", "shape": [1]},
    {"$": "scalar", "v": {"$": "bytes", "v": ""}, "dtype": "<f8"},
    {"$": "scalar", "v": "", "dtype": "V8"},
    {"$": "complex-tensor", "v": "t"},
    {"$": "deque", "v": [], "maxlen": "x"},
]


def test_what_was_not_packed_by_us_is_refused() -> None:
    for tree in FOREIGN:
        with pytest.raises(CheckpointError, match="was not written by steadystep"):
            unpack(Packed(tree, {"t": torch.zeros(8, dtype=torch.uint8)}))


def test_a_tree_without_end_is_refused() -> None:
    tree: Any = 1
    for _ in range(10 * sys.getrecursionlimit()):
        tree = [tree]
    with pytest.raises(CheckpointError, match="RecursionError"):
        unpack(Packed(tree, {}))


@pytest.mark.parametrize("kind", ["str", "bytes"])
def test_texts_with_foreign_letters_are_refused_and_not_cleaned(kind: str) -> None:
    assert unpack(Packed({"$": kind, "v": "YWJj"}, {})) in ("abc", b"abc")
    with pytest.raises(CheckpointError):
        unpack(Packed({"$": kind, "v": "YW*Jj"}, {}))


def test_of_a_sharded_tensor_the_part_of_this_rank_is_packed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = torch.arange(6.0).reshape(3, 2)
        spread = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
        packed = pack({"w": [spread]})
    finally:
        dist.destroy_process_group()
    assert torch.equal(packed.shards["w[0]"], whole)
    assert packed.places["w[0]"] == (0, 0)
    found = unpack(packed)["w"][0]
    assert found == Spread("w[0]", torch.Size([3, 2]), torch.float32)
