"""A seventh set, written after the rules by an author who had not read them."""

from .held_generative import GENERATIVE
from .held_healthy import HEALTHY
from .held_healthy_more import HEALTHY_MORE
from .held_loops import LOOPS
from .held_rl import RL
from .held_series import SERIES
from .held_tabular import TABULAR
from .held_text import TEXT
from .held_tuning import TUNING
from .held_vision import VISION
from .program import Program

FAULTY = VISION + TEXT + SERIES + TABULAR + LOOPS + RL + GENERATIVE + TUNING

HELD: tuple[Program, ...] = FAULTY + HEALTHY + HEALTHY_MORE
