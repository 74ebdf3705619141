"""What Trackio's own database holds after a run that was resumed."""

import sqlite3
from pathlib import Path

import pytest

from steadystep import tracking
from steadystep.errors import ConfigError
from steadystep.testing import _calls, _on_a_thread
from steadystep.tracking import Trackio


@pytest.mark.slow  # Trackio takes seconds to import
@pytest.mark.filterwarnings("ignore")  # of Trackio's own imports
def test_a_local_run_that_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module in ("trackio", "trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "db", raising=False)
    assert tmp_path / "db" == utils.TRACKIO_DIR
    folder = tmp_path / "run"
    folder.mkdir()
    for first in (0, 10):
        _on_a_thread(Trackio("made"), list(_calls(folder, first, 12)), f"from {first}")
    (run,) = SQLiteStorage.get_runs("made")
    rows = SQLiteStorage.get_logs("made", run)
    assert {row["step"] for row in rows if "loss/train" in row} == set(range(22))
    assert any("loss/validation" in row for row in rows)
    (database,) = (tmp_path / "db").glob("*.db")
    sqlite3.connect(database).close()


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"pip install 'steadystep\[trackio\]'"):
        Trackio()
