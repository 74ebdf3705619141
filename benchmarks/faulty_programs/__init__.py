"""Small faulty training programs, each with a working twin, and healthy programs that look strange."""

import hashlib
from typing import Literal

from .audio import AUDIO
from .autoencoder import AUTOENCODER
from .contrastive import CONTRASTIVE
from .diffusion import DIFFUSION
from .finetuning import FINETUNING
from .gan import GAN
from .graph import GRAPH
from .healthy_losses import HEALTHY_LOSSES
from .healthy_training import HEALTHY_TRAINING
from .language import LANGUAGE
from .program import Program
from .recommender import RECOMMENDER
from .rl import RL
from .sequence import SEQUENCE
from .series import SERIES
from .tabular import TABULAR
from .text import TEXT
from .unseen import UNSEEN
from .vision import VISION

PROGRAMS: tuple[Program, ...] = (
    VISION
    + TEXT
    + LANGUAGE
    + TABULAR
    + SEQUENCE
    + AUDIO
    + SERIES
    + GAN
    + RL
    + GRAPH
    + RECOMMENDER
    + FINETUNING
    + DIFFUSION
    + CONTRASTIVE
    + AUTOENCODER
    + HEALTHY_LOSSES
    + HEALTHY_TRAINING
)

EVERY = PROGRAMS + UNSEEN  # the unseen ones were written after the rules, by an author who did not know them

# The smallest number for which every family, and every label that is the best of two or more programs, is in both
# halves, and the halves are of about the same size.
SALT = 1_231_823


_UNSEEN_NAMES = frozenset(program.name for program in UNSEEN)


def half(program: Program) -> Literal["develop", "sealed", "unseen"]:
    """Return the set a program belongs to: rules may be tuned on "develop" and are judged on "sealed" and "unseen"."""
    if program.name in _UNSEEN_NAMES:
        return "unseen"
    digest = hashlib.sha256(f"{SALT}:{program.name}".encode()).digest()
    return "sealed" if digest[0] % 2 else "develop"
