"""What the documents show is what happens: every Python block runs, every link leads somewhere."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import steadystep

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
MODULES = [m.name for m in pkgutil.walk_packages(steadystep.__path__, "steadystep.") if "__main__" not in m.name]


def blocks() -> list:
    found = []
    for path in DOCUMENTS:
        if path.name == "README.zh-CN.md":  # test_readmes.py: its blocks are README.md's byte for byte
            continue
        for number, match in enumerate(re.finditer(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)):
            found.append(pytest.param(match.group(1), id=f"{path.relative_to(ROOT)}-{number}"))
    return found


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")  # these three are Lightning's, about itself
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("block", blocks())
def test_python_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is run from top to bottom in an empty folder; it shows its results with assert."""
    monkeypatch.chdir(tmp_path)
    assert "assert" in block or "import" in block
    exec(compile(block, "block", "exec"), {"__name__": "block"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:  # only an adapter may lack its framework
        if not (name.startswith("steadystep.integrations.") and str(error).startswith("this needs ")):
            raise
        pytest.skip(str(error))
    result = doctest.testmod(module)
    assert result.failed == 0


def test_the_changelog_knows_this_version() -> None:
    assert f"## {steadystep.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_make_targets_named_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in DOCUMENTS:
        for named in re.findall(r"`make ([a-z-]+)`", path.read_text()):
            assert named in targets, f"{path.name}: make {named}"
