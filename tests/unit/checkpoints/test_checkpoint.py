"""One checkpoint: whole or not there, verified when it is read, and never more than data."""

import errno
import hashlib
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from steadystep.checkpoints import atomic_io
from steadystep.checkpoints import checkpoint as manifests
from steadystep.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from steadystep.errors import CheckpointError

FILES = ("tensors.safetensors", "state.json", "manifest.json")


def a_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "flags": torch.ones(3, dtype=torch.bool),
        "turned": torch.arange(6).view(2, 3).t(),
        "model": {"w": torch.full((5, 3), value), "half": torch.ones(7, dtype=torch.bfloat16)},
        "rng": random.Random(1).getstate(),
        "lost": float("nan"),
    }


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("made"), a_state(), step=1234, updates=1200, score=0.5)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_comes_back_with_everything(template: Path) -> None:
    assert template.name == "step-00001234"
    assert files_of(template) == sorted(FILES)
    back = read_checkpoint(template)
    assert (back.path, back.step, back.updates, back.score) == (template, 1234, 1200, 0.5)
    assert torch.equal(back.state["model"]["w"], torch.ones(5, 3))
    assert back.state["model"]["half"].dtype is torch.bfloat16
    assert back.state["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert back.state["rng"] == random.Random(1).getstate()
    assert back.state["lost"] != back.state["lost"]
    assert files_of(template.parent) == [template.name]


def test_any_reader_of_safetensors_reads_the_tensors(template: Path) -> None:
    assert sorted(load_file(template / "tensors.safetensors")) == ["flags", "model.half", "model.w", "turned"]


def test_what_was_read_does_not_need_the_files(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"w": torch.arange(3000)}, step=1, updates=1)
    back = read_checkpoint(path)
    with (path / "tensors.safetensors").open("r+b") as file:
        file.write(bytes(24_000))
    assert torch.equal(back.state["w"], torch.arange(3000))


def test_scores(tmp_path: Path) -> None:
    for score in (None, 1, float("inf"), float("nan"), -0.1):
        back = read_checkpoint(write_checkpoint(tmp_path, {}, step=0, updates=0, score=score)).score
        assert str(back) == str(score if score is None else float(score))


def test_numbers_of_other_libraries(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {}, step=np.int64(3), updates=np.int32(2), score=torch.tensor(0.5))  # type: ignore[arg-type]
    back = read_checkpoint(path)
    assert (path.name, back.step, back.updates, back.score) == ("step-00000003", 3, 2, 0.5)


def test_the_manifest_says_what_is_inside(template: Path) -> None:
    said = json.loads((template / "manifest.json").read_text())
    assert said["format"] == 1
    assert said["torch"] == torch.__version__
    for name in FILES[:2]:
        raw = (template / name).read_bytes()
        assert said["files"][name] == {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_a_changed_byte_is_noticed(template: Path, name: str, where: float, change: int) -> None:
    with Damaged(template) as path:
        raw = bytearray((path / name).read_bytes())
        raw[int(where * len(raw))] ^= change
        (path / name).write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"damaged|bytes and not"):
            read_checkpoint(path)


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.binary(max_size=3))
def test_a_cut_or_longer_file_is_noticed(template: Path, name: str, where: float, more: bytes) -> None:
    with Damaged(template) as path:
        raw = (path / name).read_bytes()
        (path / name).write_bytes(raw + more if more else raw[: int(where * len(raw))])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


def test_every_byte_of_the_manifest_counts(template: Path) -> None:
    """All of them, because it is what everything else rests on: every bit, and spaces for other spaces."""
    path = template / "manifest.json"
    raw = path.read_bytes()
    assert manifests._parse(raw, path).step == 1234
    silent = []
    for place in range(len(raw)):
        for byte in {raw[place] ^ 1 << bit for bit in range(8)} | set(b" \n\t") - {raw[place]}:
            with suppress(CheckpointError):
                manifests._parse(raw[:place] + bytes([byte]) + raw[place + 1 :], path)
                silent.append((place, byte))
    assert silent == []


class Damaged:
    """A copy of a checkpoint to spoil."""

    def __init__(self, template: Path) -> None:
        self._copy = template.parent / "spoilt"
        self._template = template

    def __enter__(self) -> Path:
        return Path(shutil.copytree(self._template, self._copy))

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._copy)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(template: Path, name: str) -> None:
    with Damaged(template) as path:
        (path / name).unlink()
        with pytest.raises(CheckpointError, match=f"has no {name}"):
            read_checkpoint(path)
        (path / name).mkdir()
        with pytest.raises(CheckpointError, match=f"has no {name}"):
            read_checkpoint(path)


def test_what_is_no_checkpoint(tmp_path: Path, template: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        read_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is not a directory"):
        read_checkpoint(template / "state.json")
    shutil.copytree(template, tmp_path / "best")
    assert read_checkpoint(tmp_path / "best").step == 1234
    shutil.copytree(template, tmp_path / "step-00000007")
    with pytest.raises(CheckpointError, match="contains step 1234: it was renamed"):
        read_checkpoint(tmp_path / "step-00000007")


def forged(path: Path, **changes: Any) -> None:
    """Checksums that fit: somebody did this on purpose."""
    fields = json.loads((path / "manifest.json").read_text())
    fields.pop("checksum")
    for name in FILES[:2]:
        raw = (path / name).read_bytes()
        fields["files"][name] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (path / "manifest.json").write_bytes(manifests._render(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2, "steadystep": "9.9"}, "has format 2, written by steadystep 9.9; this version reads format 1"),
        ({"step": "x"}, "not a steadystep manifest"),
        ({"score": []}, "not a steadystep manifest"),
        ({"files": []}, "not a steadystep manifest"),
        ({"files": {"../../etc/passwd": {"size": 1, "sha256": ""}}}, "it lists"),
    ],
    ids=str,
)
def test_a_forged_manifest(template: Path, changes: dict[str, Any], message: str) -> None:
    with Damaged(template) as path:
        forged(path, **changes)
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(path)


def tensor_file(header: bytes, data: bytes = b"", claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if claimed is None else claimed) + header + data


def one_tensor(shape: list[int], end: int, dtype: str = "F32") -> bytes:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}).encode()


STRANGE = {
    "a header longer than the file": tensor_file(b"{}", claimed=1 << 20),
    "an absurd header": tensor_file(b"{}", claimed=1 << 63),
    "nothing": b"",
    "no JSON": tensor_file(b"[["),
    "offsets beyond the end": tensor_file(one_tensor([9], 36)),
    "a shape that does not fit": tensor_file(one_tensor([9], 4), bytes(4)),
    "a shape beyond counting": tensor_file(one_tensor([2**32, 2**32, 2**32], 4), bytes(4)),
    "an unknown dtype": tensor_file(one_tensor([1], 4, "PICKLE"), bytes(4)),
    "a pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94",
}


def test_a_stranger_s_tensors(template: Path) -> None:
    for raw in STRANGE.values():
        with Damaged(template) as path:
            (path / "tensors.safetensors").write_bytes(raw)
            forged(path)
            with pytest.raises(CheckpointError, match="not a readable safetensors file"):
                read_checkpoint(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "is not the JSON of a state"),
        ("{", "is not the JSON of a state"),
        ("3", "contains a int, not a state"),
        ('{"a": {"$": "tensor", "v": "other"}}', "state.json: the state .* was not written by steadystep"),
    ],
    ids=["deep", "cut", "number", "absent"],
)
def test_a_stranger_s_state(template: Path, text: str, message: str) -> None:
    with Damaged(template) as path:
        (path / "state.json").write_text(text)
        forged(path)
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(path)


def test_a_manifest_that_is_too_large_is_not_read(template: Path) -> None:
    with Damaged(template) as path:
        with (path / "manifest.json").open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(CheckpointError, match="not a steadystep manifest"):
            read_checkpoint(path)


def test_the_disk_has_each_part_before_the_next_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[object, int]] = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(handle: int) -> None:
        fsync(handle)
        events.append((os.fstat(handle).st_ino, os.fstat(handle).st_size))

    def spy_rename(old: Path, new: Path) -> None:
        rename(old, new)
        events.append(("rename", 0))

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    path = write_checkpoint(tmp_path, a_state(), step=1, updates=1)
    names = {(path / name).stat().st_ino: name for name in FILES}
    names |= {path.stat().st_ino: "folder", tmp_path.stat().st_ino: "parent", "rename": "rename"}
    assert [names[what] for what, _ in events] == [*FILES, "folder", "rename", "parent"]
    assert [size for _, size in events[:3]] == [(path / name).stat().st_size for name in FILES]


CALLS = {"open", "write", "flush", "fsync", "mkdir", "rename"}


def fail_at(number: int, do: Callable[[], object]) -> bool:
    """Run `do` with a disk that is full from call `number` on; False when there are not so many calls."""
    seen = 0

    def watch(frame: object, event: str, called: Any) -> None:
        nonlocal seen
        if event == "c_call" and called.__name__ in CALLS:
            seen += 1
            if seen == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.setprofile(watch)
    try:
        do()
    except CheckpointError as error:
        assert "No space left on device" in str(error)  # noqa: PT017 - the point is that it is this one
        return True
    finally:
        sys.setprofile(None)
    assert seen < number, "a full disk was not reported"
    return False


@pytest.mark.parametrize("same_step", [False, True])
def test_a_full_disk_at_any_moment_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_step: bool
) -> None:
    monkeypatch.setattr(atomic_io, "_PIECE", 64)
    write_checkpoint(tmp_path, a_state(1.0), step=1, updates=1)
    step = 1 if same_step else 2
    number = 1
    while fail_at(number, lambda: write_checkpoint(tmp_path, a_state(2.0), step=step, updates=2)):
        back = read_checkpoint(tmp_path / "step-00000001")
        new = tmp_path / f"step-{step:08d}"
        if new.exists() and read_checkpoint(new).updates == 2:  # only the disk's last word was missing
            break
        assert back.updates == 1
        assert files_of(tmp_path) == ["step-00000001"]
        number += 1
    assert number > 20


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^a\[0\] is a object"):
        write_checkpoint(tmp_path, {"a": [object()]}, step=1, updates=1)
    with pytest.raises(CheckpointError, match="step = -1"):
        write_checkpoint(tmp_path, {}, step=-1, updates=1)
    with pytest.raises(CheckpointError, match=r"could not be written \(No such file or directory\)"):
        write_checkpoint(tmp_path / "absent", {}, step=1, updates=1)
    assert files_of(tmp_path) == []


def test_our_writer_and_the_library_s_agree(tmp_path: Path) -> None:
    tensors = {"b": torch.tensor([True, False, True]), "w": torch.randn(3, 2), "e": torch.empty(0, 4)}
    tensors["h"] = torch.tensor(2.5, dtype=torch.float8_e5m2)
    save_file(tensors, tmp_path / "library")
    path = write_checkpoint(tmp_path, tensors, step=1, updates=1)
    ours, theirs = load_file(path / "tensors.safetensors"), load_file(tmp_path / "library")
    assert ours.keys() == theirs.keys()
    raw = (path / "tensors.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    starts = {name: entry["data_offsets"][0] for name, entry in json.loads(raw[8 : 8 + length]).items()}
    assert length % 8 == 0
    assert [name for name in tensors if starts[name] % tensors[name].element_size()] == []  # readers map the file
    for name in ours:
        assert ours[name].dtype is theirs[name].dtype
        assert torch.equal(ours[name].float(), theirs[name].float())
