"""Programs written after the rules of the diagnosis, by an author who had not read them."""

from .program import Program
from .unseen_audio import AUDIO
from .unseen_finetuning import FINETUNING
from .unseen_generative import GENERATIVE
from .unseen_graph import GRAPH
from .unseen_healthy import HEALTHY
from .unseen_recommender import RECOMMENDER
from .unseen_rl import RL
from .unseen_series import SERIES
from .unseen_tabular import TABULAR
from .unseen_text import TEXT
from .unseen_vision import VISION

UNSEEN: tuple[Program, ...] = (
    VISION + TEXT + TABULAR + SERIES + AUDIO + RL + GENERATIVE + FINETUNING + GRAPH + RECOMMENDER + HEALTHY
)
