"""A fourth set, written after the rules by an author who had not read them."""

from .fresh_bandits import BANDITS
from .fresh_finetuning import FINETUNING
from .fresh_generative import GENERATIVE
from .fresh_healthy import HEALTHY
from .fresh_healthy_more import MORE
from .fresh_language import LANGUAGE
from .fresh_pairs import PAIRS
from .fresh_rl import CART
from .fresh_series import SERIES
from .fresh_tables import TABLES
from .fresh_text import TEXT
from .fresh_vision import VISION
from .program import Program

FAULTY = VISION + LANGUAGE + TEXT + CART + BANDITS + GENERATIVE + PAIRS + SERIES + FINETUNING + TABLES

FRESH: tuple[Program, ...] = FAULTY + HEALTHY + MORE
