"""An eighth set, written for a diagnosis that its author had not read."""

from .program import Program
from .spare_generative import GENERATIVE
from .spare_healthy import HEALTHY
from .spare_healthy_more import HEALTHY_MORE
from .spare_pairs import PAIRS
from .spare_physics import PHYSICS
from .spare_rl import RL
from .spare_series import SERIES
from .spare_tabular import TABULAR
from .spare_text import TEXT
from .spare_tuning import TUNING
from .spare_values import VALUES
from .spare_vision import VISION

FAULTY = VISION + TEXT + SERIES + TABULAR + RL + GENERATIVE + PHYSICS + PAIRS + TUNING + VALUES

SPARE: tuple[Program, ...] = FAULTY + HEALTHY + HEALTHY_MORE
