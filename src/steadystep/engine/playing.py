"""Plays rollouts of a policy under earlier weights, where the judge asks for them."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from steadystep._utils.rng import random_numbers_kept
from steadystep.engine.rollouts import ROLLOUTS
from steadystep.rl.controls import Controls
from steadystep.snapshots.buffers import Buffers
from steadystep.snapshots.recovery import Recovery


@final
@dataclass(slots=True)
class Rollouts:
    """Plays the policy under the current weights and under those of earlier states; nothing stays changed by it."""

    recovery: Recovery
    buffers: Buffers
    device: torch.device
    alone: bool
    """One process: others would have to play along."""
    controls: Controls | None = None

    def scores(self, states: Sequence[Any], seed: int) -> list[list[float]] | None:
        """What each earns in eight rollouts, the current weights first; None where it cannot be told."""
        evaluate = None if self.controls is None else self.controls.evaluate
        if evaluate is None or not self.alone:
            return None
        try:
            played = [[self._play(evaluate, seed + i) for i in range(ROLLOUTS)]]
            for state in states:
                with self.recovery.weights_of(state):
                    played.append([self._play(evaluate, seed + i) for i in range(ROLLOUTS)])
        except Exception:  # the user's code, run at a time they did not expect: whatever it raises means "cannot be"
            return None
        return played if all(math.isfinite(score) for scores in played for score in scores) else None

    def _play(self, evaluate: Any, seed: int) -> float:
        with torch.no_grad(), self.buffers.untouched(), random_numbers_kept(self.device):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            return float(evaluate())
