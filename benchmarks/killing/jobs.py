"""One life of the program: what it trains, where, and what happens to it."""

import json
import os
import resource
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from killing.moments import Moment, Moments
from killing.variants import Variant


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process is to do. It leaves `result.json` and `stderr.txt` in `desk`."""

    variant: Variant
    desk: str
    folder: str | None = None
    moments: tuple[Moment, ...] = ()
    kill_after_s: float | None = None
    largest_file: int | None = None
    """Bytes; the system refuses more, as a full disk would."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Job":
        """Back from it."""
        raw = json.loads(line)
        raw |= {"variant": Variant(**raw["variant"]), "moments": tuple(Moment(**moment) for moment in raw["moments"])}
        return cls(**raw)

    def run(self) -> None:
        """In this process, which has nothing else to do."""
        import torch

        from killing.program import train

        desk = Path(self.desk)
        stderr = os.open(desk / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stderr, 2)
        torch.set_num_threads(1)
        warnings.simplefilter("always")
        if self.largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.largest_file, resource.RLIM_INFINITY))
        moments = Moments(self.moments)
        moments.watch_the_disk()
        result: dict[str, Any] = train(self.variant, None if self.folder is None else Path(self.folder), moments)
        result["counts"] = dict(moments.counts)
        (desk / "result.json").write_text(json.dumps(result))
        os._exit(0)  # why: taking the interpreter down costs more than the training; other ends are the real ones
