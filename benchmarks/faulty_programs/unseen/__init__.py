"""Programs written after the rules of the diagnosis, by an author who had not read them."""

from ..program import Program
from .tabular import TABULAR
from .text import TEXT
from .vision import VISION

UNSEEN: tuple[Program, ...] = VISION + TEXT + TABULAR
