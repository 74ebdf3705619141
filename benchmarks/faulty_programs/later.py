"""A fifth set, written after the rules by an author who had not read them."""

from .later_finetuning import PARTS
from .later_generative import GENERATIVE
from .later_healthy import HEALTHY
from .later_loops import LOOPS
from .later_rl import RL
from .later_series import SERIES
from .later_tabular import TABULAR
from .later_text import TEXT
from .later_vision import VISION
from .program import Program

FAULTY = VISION + TEXT + TABULAR + SERIES + RL + GENERATIVE + PARTS + LOOPS

LATER: tuple[Program, ...] = FAULTY + HEALTHY
