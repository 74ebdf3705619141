"""Promise 6: stopped anywhere and resumed, a run ends with the same bits; what is damaged on disk is noticed.

Real processes, killed at random moments: tests/integration/test_kill_resume.py. More loops are in
tests/unit/checkpoints/test_resume.py.
"""

from pathlib import Path

import pytest

from steadystep.checkpoints import store
from tests.loops import assert_same
from tests.unit.checkpoints.test_resume import CrashedError, train


@pytest.mark.parametrize("crash_at", range(1, 20, 3))
def test_wherever_it_stops(tmp_path: Path, crash_at: int) -> None:
    expected, *_ = train(None)
    with pytest.raises(CrashedError):
        train(tmp_path, crash_at=crash_at, frequency=2)
    assert_same(train(tmp_path, frequency=2)[0], expected)


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, file: str) -> None:
    expected, *_ = train(None)
    for crash_at in (5, 8):  # why: one write in each; a second one is left out while a slow disk has the first
        with pytest.raises(CrashedError):
            train(tmp_path, crash_at=crash_at, frequency=3)
        store._finish()  # as at the end of a process
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    content = bytearray((newest / file).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / file).write_bytes(content)
    with pytest.warns(UserWarning, match=newest.name):
        got, *_ = train(tmp_path, frequency=3)
    assert_same(got, expected)
