"""Finds reads from device to host that are not marked.

A read such as `.item()` or `.tolist()` makes the host wait for the device. In `src/` each one needs a `# sync:` comment
on its line that says when it happens. `lab/` and `cli/` train for show and are exempt, and so are the parts that the
import contracts keep from torch: their arrays are numpy's.
"""

import ast
import sys
from pathlib import Path

READS = {"item", "tolist", "cpu", "numpy"}
SOURCE = Path(__file__).parent.parent / "src" / "steadystep"
EXEMPT = ("lab", "cli", "runs", "tracking", "pages")


def unmarked_reads(path: Path) -> list[int]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    hits = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in READS:
            continue
        if "# sync:" not in lines[(node.end_lineno or node.lineno) - 1]:
            hits.append(node.lineno)
    return hits


def main() -> int:
    found = [
        f"{path}:{line}: a host read without a '# sync:' comment"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in EXEMPT
        for line in unmarked_reads(path)
    ]
    print("\n".join(found) or "host reads: all marked")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
