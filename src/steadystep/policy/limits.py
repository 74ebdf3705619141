"""How deep the ladder cuts and how long it waits."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Settings of the ladder, as plain numbers."""

    rolls_back: bool = True
    trust_steps: int = 20
    """Healthy steps before a remembered state may be used."""
    lr_mult: float = 0.7
    lr_mult_again: float = 0.5
    lr_floor_mult: float = 0.01
    """No cut goes below this share of the learning rate asked for."""
    rewarm_steps: int = 50
    unmeant_hold: int = 500
    """Updates before a learning rate that nobody announced is tried, step by step."""
    early_hold: int = 1600
    """Updates before a learning rate is tried again whose first updates multiplied the loss."""
    skips_batches: bool = True
    """False: the loop will give the same batches again, so random numbers go back too."""
    catches_up: bool = False
    """After going back, remembered batches are run again."""
