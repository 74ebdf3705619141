"""Run by torchrun: every check of one kind, one after the other, because processes are slow to start.

Arguments: "two" or "four" (ranks), and a folder.
"""

import sys
from pathlib import Path

from tests.distributed import agreement, dying, saving, unequal
from tests.distributed.setting import run

KINDS = ("ddp", "fsdp")

if __name__ == "__main__":
    which, folder = sys.argv[1], Path(sys.argv[2])
    checks = agreement.ALL | unequal.ALL if which == "two" else agreement.BRIEFLY
    todo = {f"{kind} {name}": lambda c=c, k=kind: c(k) for kind in KINDS for name, c in checks.items()}
    for kind in KINDS:
        files = saving.WRITE | unequal.SAVE if which == "two" else saving.READ
        todo |= {f"{kind} {name}": lambda c=c, k=kind: c(k, folder) for name, c in files.items()}
    if which == "two":
        todo["never killed"] = lambda: dying.whole_run(folder)
    run(todo)
