"""A hook of hatchling: the README as a package index shows it, with links and pictures that work there.

In the repository the README links to files beside it. An index has only the text, so links become addresses of the
repository that the release workflow builds from. A build elsewhere knows no address: links become plain text.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def for_index(text: str, environment: Mapping[str, str]) -> str:
    """Return the README with absolute links, or without links where the repository is unknown."""
    repository, commit = environment.get("GITHUB_REPOSITORY"), environment.get("GITHUB_SHA")

    def absolute(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if not repository or not commit:
            return "" if picture else label
        host = "https://raw.githubusercontent.com" if picture else "https://github.com"
        place = f"{host}/{repository}/{commit}" if picture else f"{host}/{repository}/blob/{commit}"
        return f"{picture}[{label}]({place}/{target})"

    return _LINK.sub(absolute, text)


def urls(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the project's addresses in the repository that a release is built from; none where that is unknown."""
    repository = environment.get("GITHUB_REPOSITORY")
    if not repository:
        return {}
    home = f"https://github.com/{repository}"
    pages = {"Documentation": "tree/main/docs", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
    return {"Source": home, **{name: f"{home}/{path}" for name, path in pages.items()}}


class IndexReadme(MetadataHookInterface):
    """Sets `readme` when a wheel or an archive of sources is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the text to the project's metadata."""
        text = for_index((Path(self.root) / "README.md").read_text(encoding="utf-8"), os.environ)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(os.environ)
