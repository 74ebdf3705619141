"""Small faulty training programs, each with a working twin, and healthy programs that look strange."""

import hashlib
from typing import Literal

from .audio import AUDIO
from .autoencoder import AUTOENCODER
from .contrastive import CONTRASTIVE
from .diffusion import DIFFUSION
from .finetuning import FINETUNING
from .fresh import FRESH
from .gan import GAN
from .graph import GRAPH
from .healthy_losses import HEALTHY_LOSSES
from .healthy_training import HEALTHY_TRAINING
from .held import HELD
from .language import LANGUAGE
from .later import LATER
from .next import NEXT
from .program import Program
from .recommender import RECOMMENDER
from .rl import RL
from .sequence import SEQUENCE
from .series import SERIES
from .spare import SPARE
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

# The last six were written after the rules, by authors who did not know them.
EVERY = PROGRAMS + UNSEEN + FRESH + LATER + NEXT + HELD + SPARE

# The smallest number for which every family, and every label that is the best of two or more programs, is in both
# halves, and the halves are of about the same size.
SALT = 1_231_823


_UNSEEN_NAMES = frozenset(program.name for program in UNSEEN)
_FRESH_NAMES = frozenset(program.name for program in FRESH)
_LATER_NAMES = frozenset(program.name for program in LATER)
_NEXT_NAMES = frozenset(program.name for program in NEXT)
_HELD_NAMES = frozenset(program.name for program in HELD)
_SPARE_NAMES = frozenset(program.name for program in SPARE)


def half(program: Program) -> Literal["develop", "sealed", "unseen", "fresh", "later", "next", "held", "spare"]:
    """Return the set a program belongs to: rules may be tuned on "develop" and are judged on the other seven."""
    if program.name in _UNSEEN_NAMES:
        return "unseen"
    if program.name in _FRESH_NAMES:
        return "fresh"
    if program.name in _LATER_NAMES:
        return "later"
    if program.name in _NEXT_NAMES:
        return "next"
    if program.name in _HELD_NAMES:
        return "held"
    if program.name in _SPARE_NAMES:
        return "spare"
    digest = hashlib.sha256(f"{SALT}:{program.name}".encode()).digest()
    return "sealed" if digest[0] % 2 else "develop"
