"""What `make bench-rivals` left: rows of the real packages, made in an environment of their own."""

import json
from pathlib import Path

from steadystep.lab.bench.study import Row

RESULTS = Path("benchmarks/results")
"""Where both look, from the folder of the repository."""


def stored_rows(name: str = "rivals", folder: Path = RESULTS) -> list[Row]:
    """Of the recovery study ("rivals") or the overhead study ("rivals-overhead"); none where nobody has run them."""
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # a line that was being written when the last run was stopped
            continue
        if "row" in entry:
            rows.append(entry["row"])
    return rows
