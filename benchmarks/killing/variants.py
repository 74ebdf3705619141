"""Training programs that differ in everything a checkpoint has to carry."""

import random
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One program."""

    seed: int = 0
    optimizer: str = "AdamW"
    loader: str = "shuffled"
    precision: str = "fp32"
    accumulate: int = 1
    schedule: str | None = None
    clip_rule: str | None = None
    validates: bool = True
    frequency: int = 3
    keep: int = 3
    epochs: int = 3

    def config(self) -> dict[str, Any]:
        """For the guard."""
        training: dict[str, Any] = {
            "mixed_precision": self.precision,
            "gradient_accumulation_steps": self.accumulate,
            "clip_rule": self.clip_rule,
            "early_stopping": self.validates,
        }
        if self.schedule is not None:
            training |= {"lr_scheduler": self.schedule, "total_steps": 40, "warmup_steps": 3}
        return {
            "training": training,
            # why no sinks: an import that goes on in their thread makes Python forget that Ctrl-C ended the program
            "monitoring": {"checkpoint_frequency": self.frequency, "keep_checkpoints": self.keep, "sinks": []},
        }


def drawn(seed: int, count: int) -> list[Variant]:
    """So many, the same for the same seed; each value of each setting comes up in every few."""
    rng = random.Random(seed)
    dials: dict[str, list[Any]] = {
        "optimizer": ["AdamW", "SGD"],
        "loader": ["shuffled", "own generator", "stream"],
        "precision": ["fp32", "fp32", "bf16", "fp16"],
        "accumulate": [1, 1, 2, 3],
        "schedule": [None, "cosine", "plateau", "linear"],
        "clip_rule": [None, "zscore"],
        "validates": [True, True, False],
        "frequency": [1, 2, 3, 5],
        "keep": [1, 2, 3],
    }
    columns = {}
    for name, values in dials.items():
        column = [values[i % len(values)] for i in range(count)]
        rng.shuffle(column)
        columns[name] = column
    return [Variant(seed=seed + i, **{name: column[i] for name, column in columns.items()}) for i in range(count)]
