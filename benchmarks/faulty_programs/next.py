"""A sixth set, written after the rules by an author who had not read them."""

from .next_dense import DENSE
from .next_generative import GENERATIVE
from .next_healthy import HEALTHY
from .next_healthy_more import HEALTHY_MORE
from .next_pairs import PAIRS
from .next_rl import RL
from .next_series import SERIES
from .next_tabular import TABULAR
from .next_text import TEXT
from .next_tuning import TUNING
from .next_vision import VISION
from .program import Program

FAULTY = VISION + DENSE + TEXT + TABULAR + SERIES + RL + GENERATIVE + PAIRS + TUNING

NEXT: tuple[Program, ...] = FAULTY + HEALTHY + HEALTHY_MORE
