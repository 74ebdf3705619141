"""The documentation as a site: it builds without a warning, and every link leads somewhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])
FAILURES = sorted(path for path in ROOT.glob("docs/failures/*.md") if path.stem != "index")
_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.M | re.S)


def links(text: str) -> list[str]:
    """Every target of a link or picture outside code, Markdown's and HTML's."""
    text = _CODE.sub("", text)
    return re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(r"<(?:img|a)\b[^>]*?(?:src|href)=\"([^\"]+)\"", text)


def anchors(text: str) -> set[str]:
    """What a heading can be called by, as repositories' pages and as mkdocs make it."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\s-]", "", plain.lower())
        found |= {slug.replace(" ", "-"), re.sub(r"[-\s]+", "-", slug.strip())}
    return found | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def problems(path: Path) -> list[str]:
    """Links of this page that lead nowhere."""
    found = []
    for target in links(path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists():
            found.append(f"{target}: no such file")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text()):
            found.append(f"{target}: no such heading")
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_picture_and_anchor_leads_somewhere(path: Path) -> None:
    assert problems(path) == []


def test_the_checker_sees_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `code` heading: with [words](x.md)\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-code-heading-with-words) [c](#here) `[code](nowhere.md)`\n# Here\n"
        '[d](gone.md) ![e](gone.png) [f](other.md#gone) [g](#gone) <img src="gone.svg"> [h](https://example.org/x)\n'
        "```text\n[code](nowhere.md)\n```\n"
    )
    wrong = [problem.split(":")[0] for problem in problems(page)]
    assert wrong == ["gone.md", "gone.png", "other.md#gone", "#gone", "gone.svg"]


@pytest.mark.slow  # `make docs`, part of CI, builds it strictly too
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("material", "mkdocstrings"))), reason="no site tools: pip install '.[docs]'"
)
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    site = tmp_path / "site"
    assert (site / "failures" / "nan-loss.html").exists()
    assert (site / "repository" / "benchmarks" / "index.html").exists()
    clip, config = ((site / "reference" / f"{name}.html").read_text() for name in ("clip", "config"))
    assert 'id="steadystep.clip.ClipReport"' in clip  # from docstrings, with a table of its fields
    assert "<code>norm_before</code>" in clip
    assert "rollbacks per 1,000 steps" in config  # the description of a key
    page = (site / "index.html").read_text()
    fetched = re.findall(r"<(?:script|img)\b[^>]*\bsrc=\"(https?:[^\"]+)\"", page)
    fetched += re.findall(r"<link\b[^>]*\brel=\"(?:stylesheet|preconnect)\"[^>]*\bhref=\"(https?:[^\"]+)\"", page)
    assert fetched == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = set(re.findall(r"([\w/-]+\.md)", navigation))
    assert listed == {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}


@pytest.mark.parametrize("path", FAILURES, ids=lambda path: path.stem)
def test_a_failure_page_has_its_parts(path: Path) -> None:
    text = path.read_text()
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings == ["Symptom", "Cause", "What steadystep does", "What to change", "Reproduce"]
    assert "assert" in text
    assert len(text.splitlines()) <= 60
    picture = ROOT / "docs" / "images" / "failures" / f"{path.stem}.png"
    assert picture.stat().st_size < 60_000
    assert f"failures/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text()
    assert f"({path.name})" in (ROOT / "docs" / "failures" / "index.md").read_text()
