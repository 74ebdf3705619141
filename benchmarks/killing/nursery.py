"""Processes that begin with torch imported: one waits with everything loaded, and forks for each job.

A child that does not reach the end of its job leaves like any other program, so its exit code and what it does at exit
are the real ones. Run as a program this file is the one that waits.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from killing.jobs import Job

_BENCHMARKS = str(Path(__file__).parents[1])


@final
@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: `code` as in `subprocess`, the result if it got that far, what it said."""

    code: int
    result: dict[str, Any] | None
    said: str


@final
class Nursery:
    """Runs jobs, one at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join([_BENCHMARKS, *filter(None, [os.environ.get("PYTHONPATH")])])
        # why the threads: a process with more than one must not fork
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._waiting = subprocess.Popen(
            [sys.executable, "-m", "killing.nursery"],
            env={**os.environ, **single, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: Job) -> Ended:
        """To its end, whatever that is."""
        desk = Path(job.desk)
        desk.mkdir(parents=True, exist_ok=True)
        (desk / "result.json").unlink(missing_ok=True)
        assert self._waiting.stdin is not None
        assert self._waiting.stdout is not None
        self._waiting.stdin.write(job.to_json() + "\n")
        self._waiting.stdin.flush()
        code = int(self._waiting.stdout.readline())
        done = (desk / "result.json").exists() and code == 0
        result = json.loads((desk / "result.json").read_text()) if done else None
        return Ended(code, result, (desk / "stderr.txt").read_text() if (desk / "stderr.txt").exists() else "")

    def close(self) -> None:
        """Nobody is left."""
        assert self._waiting.stdin is not None
        assert self._waiting.stdout is not None
        self._waiting.stdin.close()
        self._waiting.wait()
        self._waiting.stdout.close()

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_for_jobs() -> Job | None:
    """In a child: its job. In the one that waits: None, when there are no more."""
    import killing.program  # noqa: F401 - what every child needs

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored

    gc.collect()
    gc.freeze()  # why: a child that looks at what it inherited copies it
    for line in sys.stdin:
        job = Job.from_json(line)
        child = os.fork()
        if child == 0:
            return job
        if job.kill_after_s is not None:
            time.sleep(job.kill_after_s)
            os.kill(child, signal.SIGKILL)  # nobody has waited for it yet, so the number is still its own
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


if __name__ == "__main__":
    mine = wait_for_jobs()
    if mine is not None:
        mine.run()
