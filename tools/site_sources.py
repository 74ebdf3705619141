"""A hook of mkdocs: what the pages link to outside docs/ (benchmarks, examples, tests) becomes part of the site.

Links stay as they are on disk, so that they also work where the repository is browsed.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PLACE = "repository"
_LINK = re.compile(r"(\]\()([^)\s#]+)([^)]*\))")


def _outside(page: Path, target: str) -> Path | None:
    """The file in the repository that a link leads to, if that is not one of docs/."""
    if "://" in target or target.startswith(("/", "mailto:")):
        return None
    found = (page.parent / target).resolve()
    inside = found.is_relative_to(ROOT / "docs") or not found.is_relative_to(ROOT)
    return None if inside or not found.exists() else found.relative_to(ROOT)


def on_files(files: Files, config: Any) -> Files:
    """Add them, pages as pages and the rest as it is; what added pages link to is added too."""
    waiting = [(ROOT / "docs" / file.src_uri, ROOT / "docs" / file.src_uri) for file in files.documentation_pages()]
    known: set[Path] = set()
    while waiting:
        page, _ = waiting.pop()
        for match in _LINK.finditer(page.read_text()):
            found = _outside(page, match[2])
            if found is None or found in known or not (ROOT / found).is_file():
                continue
            known.add(found)
            files.append(File.generated(config, f"{PLACE}/{found}", abs_src_path=str(ROOT / found)))
            if found.suffix == ".md":
                waiting.append((ROOT / found, ROOT / found))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Lead links to where the files are in the site; folders have no page and become plain text."""
    uri = page.file.src_uri
    moved = uri.startswith(f"{PLACE}/")
    source = ROOT / uri.removeprefix(f"{PLACE}/") if moved else ROOT / "docs" / uri
    up = "../" * uri.count("/")

    def lead(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target.startswith(("/", "mailto:")):
            return match[0]
        found = (source.parent / target).resolve()
        if found.is_dir():
            return f"{match[1]}{up}index.md)"
        if found.is_relative_to(ROOT / "docs"):
            return f"{match[1]}{up}{found.relative_to(ROOT / 'docs')}{match[3]}" if moved else match[0]
        if not found.is_relative_to(ROOT):
            return match[0]
        return f"{match[1]}{up}{PLACE}/{found.relative_to(ROOT)}{match[3]}"

    return _LINK.sub(lead, markdown)
