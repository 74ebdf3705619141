"""Ways in which a file comes to be something else, drawn from a seed; and paths that are no files."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOSTILE = ("\x1b", "\x07", "\x9b")
"""What a terminal obeys."""

_WORDS = (
    b"\x00",
    b"\xff\xfe\xfd",
    b"\x1b[2J\x07",
    b"nan",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"[" * 5000,
    b"{" * 5000,
    b'{"a":' * 3000,
    b"n" * 5000,
    b"!!python/object/apply:os.system ['true']",
    b"&a [*a]",
    b"../x:make",
    b"\xe2\x80\xae\xf0\x9f\xa7\xa8",
    b"<script>alert(1)</script>",
    b"\n" * 100,
    b'"',
    b": : :",
    b"\t- \r",
)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    10**400,
    1e308,
    "",
    "x" * 5000,
    "\x1b[2J\x07",
    "../../../etc/passwd",
    [],
    {},
    [[]],
    {"a": {"b": [1, None]}},
    "NaN",
    [1, "a"] * 50,
)


def damaged(path: Path, rng: random.Random, *, text: bool) -> str:
    """Change the file once; returns how."""
    raw = path.read_bytes()
    ways = [_flip, _cut, _swap, _double, _zero, _insert, _empty] + ([_insert, _value, _value] if text else [])
    way = rng.choice(ways)
    new = way(raw, rng)
    if new == raw:
        way, new = _flip, _flip(raw, rng)
    path.write_bytes(new)
    return way.__name__.strip("_")


def _flip(raw: bytes, rng: random.Random) -> bytes:
    changed = bytearray(raw or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(raw: bytes, rng: random.Random) -> bytes:
    return raw[: rng.randrange(len(raw) + 1)] if rng.random() < 0.7 else raw[rng.randrange(len(raw) + 1) :]


def _swap(raw: bytes, rng: random.Random) -> bytes:
    a, b, c, d = sorted(rng.randrange(len(raw) + 1) for _ in range(4))
    return raw[:a] + raw[c:d] + raw[b:c] + raw[a:b] + raw[d:]


def _double(raw: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    return raw[:b] + raw[a:b] * rng.choice((1, 1, 20)) + raw[b:]


def _zero(raw: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    return raw[:a] + rng.choice((b"\0", b" ", b"\xff")) * (b - a) + raw[b:]


def _insert(raw: bytes, rng: random.Random) -> bytes:
    at, word = rng.randrange(len(raw) + 1), rng.choice((*_WORDS, rng.randbytes(40)))
    return raw[:at] + word + raw[at:]


def _empty(raw: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"", b"\n", b"{}", b"[]", b"null", b"0", b"\0" * 64))


def _value(raw: bytes, rng: random.Random) -> bytes:
    """JSON or YAML with one value of another kind; what is neither gets a word instead."""
    text = raw.decode("utf-8", "replace")
    lines = text.splitlines()
    number = rng.randrange(len(lines)) if lines else 0
    for source in (text, lines[number] if lines else ""):
        try:
            tree = json.loads(source)
        except (ValueError, RecursionError):
            continue
        if isinstance(tree, dict | list) and tree:
            place = _place(tree, rng)
            place[0][place[1]] = rng.choice(_VALUES)
            new = json.dumps(tree, indent=2 if source is text else None)
            return (new if source is text else "\n".join([*lines[:number], new, *lines[number + 1 :]])).encode() + b"\n"
    if lines and ":" in lines[number]:  # a line of YAML
        key = lines[number].partition(":")[0]
        lines[number] = f"{key}: {json.dumps(rng.choice(_VALUES))}"
        return "\n".join(lines).encode() + b"\n"
    return _insert(raw, rng)


def _place(tree: Any, rng: random.Random) -> tuple[Any, Any]:
    while True:
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        inner = tree[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            return tree, key
        tree = inner


def odd_paths(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """What is no file, or none that a run would have, for every verb that takes a path."""
    folder.mkdir(parents=True)
    os.mkfifo(folder / "pipe.yaml")
    os.mkfifo(folder / "run.jsonl")
    (folder / "empty.yaml").write_text("")
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    (folder / "x.yaml").write_text("task: ../x:make\n")
    (folder / "y.yaml").write_text("task: .x:make\n")
    (folder / "z.yaml").write_text("task: 'os:path.join'\n")
    paths = {
        "/dev/zero": "/dev/zero",
        "/dev/null": "/dev/null",
        "a pipe": str(folder / "pipe.yaml"),
        "a folder with a pipe for a log": str(folder),
        "a link to itself": str(folder / "loop.yaml"),
        "an empty file": str(folder / "empty.yaml"),
        "nothing": str(folder / "nothing.yaml"),
        "a name of 300 bytes": "n" * 300 + ".yaml",
        "a path of 10,000 bytes": "n/" * 5000,
        "task: ../x:make": str(folder / "x.yaml"),
        "task: .x:make": str(folder / "y.yaml"),
        "task: os:path.join": str(folder / "z.yaml"),
    }
    for name, path in paths.items():
        run = ["--run-dir", str(folder / "out")]
        for command in (
            ["check", path],
            ["diagnose", path],
            ["report", path],
            ["compare", path, path],
            ["train", path, *run],
            ["replay", path, "--factory", "os:path"],
        ):
            yield f"{command[0]}: {name}", command
