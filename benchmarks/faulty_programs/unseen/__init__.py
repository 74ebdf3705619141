"""Programs written after the rules of the diagnosis, by an author who had not read them."""

from ..program import Program
from .generative import GENERATIVE
from .rl import RL
from .series import SERIES
from .tabular import TABULAR
from .text import TEXT
from .vision import VISION

UNSEEN: tuple[Program, ...] = VISION + TEXT + TABULAR + SERIES + RL + GENERATIVE
