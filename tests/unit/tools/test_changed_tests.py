"""`make test-fast` chooses the tests of what changed, and never fewer than the core."""

import subprocess
from pathlib import Path

import pytest
from tools.changed_tests import CORE_MARK, MOST_ROOMS, ROOT, base, changed_files, core_files, main, unit_tests_of

ROOMS = ["actions", "clip", "engine", "policy", "signals", "stats"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for room in ROOMS:
        (tmp_path / "tests/unit" / room).mkdir(parents=True)
        (tmp_path / "tests/unit" / room / "test_one.py").write_text("")
    (tmp_path / "tests/unit/tools").mkdir()
    (tmp_path / "tests/unit/test_guard.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ("src/steadystep/clip/learned.py", ["tests/unit/clip"]),
        ("src/steadystep/clip/assets/deep/file.js", ["tests/unit/clip"]),
        ("src/steadystep/guard.py", ["tests/unit/test_guard.py"]),
        ("src/steadystep/version.py", []),
        ("src/steadystep/nowhere/file.py", []),
        ("tools/mutate/reach.py", ["tests/unit/tools"]),
        ("tests/unit/clip/test_one.py", ["tests/unit/clip/test_one.py"]),
        ("tests/unit/clip/test_deleted.py", []),
        ("tests/unit/clip/helper.py", []),
        ("docs/clip.md", []),
    ],
)
def test_one_file(tree: Path, changed: str, chosen: list[str]) -> None:
    assert unit_tests_of([changed], tree) == chosen


def test_a_file_in_a_chosen_folder_is_not_named_twice(tree: Path) -> None:
    assert unit_tests_of(["tests/unit/clip/test_one.py", "src/steadystep/clip/one.py"], tree) == ["tests/unit/clip"]


def test_many_rooms_are_narrowed_to_the_modules(tree: Path) -> None:
    few = [f"src/steadystep/{room}/one.py" for room in ROOMS[:MOST_ROOMS]]
    many = [f"src/steadystep/{room}/{name}.py" for room in ROOMS for name in ("one", "two")]
    assert unit_tests_of(few, tree) == [f"tests/unit/{room}" for room in ROOMS[:MOST_ROOMS]]
    assert unit_tests_of(many, tree) == [f"tests/unit/{room}/test_one.py" for room in ROOMS]


def test_every_kind_of_change_is_seen(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)

    git("init", "-b", "main")
    for name in ("same", "committed", "staged", "unstaged"):
        write(name, "before")
    write(".gitignore", "ignored")
    git("add", ".")
    git("commit", "-m", "first")
    assert changed_files(tmp_path, base(tmp_path)) == []
    git("checkout", "-b", "work")
    write("committed", "after")
    git("commit", "-a", "-m", "second")
    write("staged", "after")
    git("add", "staged")
    for name in ("unstaged", "untracked", "ignored"):
        write(name, "after")
    assert changed_files(tmp_path, base(tmp_path)) == ["committed", "staged", "unstaged", "untracked"]
    assert changed_files(tmp_path, "HEAD") == ["staged", "unstaged", "untracked"]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository here")
def test_an_unknown_revision_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no-such-revision"):
        changed_files(ROOT, "no-such-revision")


def test_the_core_covers_promises_and_stays_small() -> None:
    core = core_files(ROOT)
    assert {"tests/promises/test_2_no_poison.py", "tests/unit/test_records.py"} < set(core)
    assert len(core) < 12
    assert "tests/unit/tools/test_changed_tests.py" not in core, CORE_MARK


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository here")
def test_it_says_what_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--since", "HEAD", "--list"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("changed since HEAD: ")
    assert "tests/promises/test_2_no_poison.py" in second
