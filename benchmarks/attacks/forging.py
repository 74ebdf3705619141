"""Forged checkpoints: one value of a state replaced by another type, size or value, under checksums that fit."""

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadystep.checkpoints.atomic_io import mark_of, pieces, read_tensors, write_file
from steadystep.checkpoints.checkpoint import MANIFEST, STATE, TENSORS, read_manifest

Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Forgery:
    """What was done where."""

    kind: str
    """`type`, `size` or `value`."""
    where: str
    what: str


def forge(source: Path, folder: Path, rng: random.Random) -> Forgery:
    """Write a copy of the checkpoint `source` into `folder` with one thing in it forged."""
    target = folder / source.name
    target.mkdir()
    tree = json.loads((source / STATE).read_bytes())
    tensors = read_tensors(source / TENSORS)
    done = _forge_tensor(tensors, rng) if rng.random() < 0.3 else _forge_tree(tree, rng)
    write_file(target / STATE, [json.dumps(tree).encode()])
    write_file(target / TENSORS, pieces(tensors))
    manifest = read_manifest(source)
    manifest = replace(manifest, files={name: mark_of(target / name) for name in (TENSORS, STATE)})
    write_file(target / MANIFEST, [manifest.to_bytes()])
    return done


def _forge_tensor(tensors: dict[str, Tensor], rng: random.Random) -> Forgery:
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    how = rng.choice(["cut", "longer", "flat", "one number", "empty", "dtype", "nan", "inf", "gone", "negative"])
    kind = {"dtype": "type", "gone": "type", "nan": "value", "inf": "value", "negative": "value"}.get(how, "size")
    real = tensor.is_floating_point()
    if how == "cut" and tensor.dim() and tensor.shape[0] > 1:
        tensors[name] = tensor[:-1].clone()
    elif how == "longer" and tensor.dim():
        tensors[name] = torch.cat([tensor, tensor])
    elif how == "flat" and tensor.dim() > 1:
        tensors[name] = tensor.reshape(-1)
    elif how == "one number" and tensor.numel() > 1:
        tensors[name] = tensor.reshape(-1)[0].clone()
    elif how == "dtype":
        tensors[name] = (tensor.abs() * 100).to(torch.int32) if real else tensor.float()
    elif how in ("nan", "inf") and real and tensor.numel():
        tensors[name] = tensor.clone()
        tensors[name].view(-1)[rng.randrange(tensor.numel())] = float(how)
    elif how == "negative" and real:
        tensors[name] = -tensor.abs() - 1.0
    elif how == "gone":
        del tensors[name]
    else:
        how, kind = "empty", "size"
        tensors[name] = tensor.new_empty(0)
    return Forgery(kind, name, how)


_TYPES: tuple[Any, ...] = (None, "x", "3", True, [], {}, [1], {"a": 1}, 3, 0.5, {"$": "tuple", "v": [1, 2]})
_NUMBERS: tuple[Any, ...] = (-1, -7.5, 0, 10**15, 1e300, -1e300, 2**70, 1.5, {"$": "float", "v": "nan"})
_NUMBERS += ({"$": "float", "v": "inf"}, {"$": "float", "v": "-inf"})


def _forge_tree(tree: Any, rng: random.Random) -> Forgery:
    # every part of the state is as likely as every other, however many values it has
    places = list(_places(tree))
    part = rng.choice(sorted({_part(place) for place in places}))
    place = rng.choice([place for place in places if _part(place) == part])
    *way, last = place
    owner = tree
    for key in way:
        owner = owner[key]
    old = owner[last]
    numeric = isinstance(old, int | float) and not isinstance(old, bool)
    how = rng.choice(["type", "size", "value"] if numeric or isinstance(old, list | dict) else ["type", "size"])
    name = ".".join(map(str, place))
    if how == "value" and numeric:
        new = rng.choice([n for n in _NUMBERS if n != old])
        owner[last] = new
        return Forgery("value", name, f"{old!r:.20} -> {new!r:.30}")
    if how != "type" and isinstance(old, list):
        new = rng.choice([[], old[:-1], old + old, [*old, None], [old]])
        owner[last] = copy.deepcopy(new)
        return Forgery("size", name, f"{len(old)} -> {len(new)} items")
    if how != "type" and isinstance(owner, dict):
        if rng.random() < 0.5:
            del owner[last]
            return Forgery("size", name, "gone")
        owner[f"{last}x"] = owner.pop(last)
        return Forgery("size", name, "renamed")
    new = rng.choice([n for n in _TYPES if type(n) is not type(old)])
    owner[last] = copy.deepcopy(new)
    return Forgery("type", name, f"{old!r:.20} -> {new!r:.30}")


def _part(place: Path_) -> str:
    return ".".join(map(str, place[:2] if place[0] == "guard" else place[:1]))


def _places(node: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every value of the tree; of a long list the first and the last ones."""
    if isinstance(node, dict):
        keys: list[Any] = list(node)
    elif isinstance(node, list):
        keys = [*range(len(node))] if len(node) <= 8 else [0, 1, 2, len(node) - 2, len(node) - 1]
    else:
        return
    for key in keys:
        yield (*path, key)
        yield from _places(node[key], (*path, key))
