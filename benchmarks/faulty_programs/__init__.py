"""Small faulty training programs, each with a working twin, and healthy programs that look strange."""

from benchmarks.faulty_programs.audio import AUDIO
from benchmarks.faulty_programs.autoencoder import AUTOENCODER
from benchmarks.faulty_programs.contrastive import CONTRASTIVE
from benchmarks.faulty_programs.diffusion import DIFFUSION
from benchmarks.faulty_programs.finetuning import FINETUNING
from benchmarks.faulty_programs.gan import GAN
from benchmarks.faulty_programs.graph import GRAPH
from benchmarks.faulty_programs.language import LANGUAGE
from benchmarks.faulty_programs.program import Program
from benchmarks.faulty_programs.recommender import RECOMMENDER
from benchmarks.faulty_programs.rl import RL
from benchmarks.faulty_programs.sequence import SEQUENCE
from benchmarks.faulty_programs.series import SERIES
from benchmarks.faulty_programs.tabular import TABULAR
from benchmarks.faulty_programs.text import TEXT
from benchmarks.faulty_programs.vision import VISION

PROGRAMS: tuple[Program, ...] = VISION + TEXT + LANGUAGE + TABULAR + SEQUENCE + AUDIO + SERIES + GAN + RL + GRAPH + RECOMMENDER + FINETUNING + DIFFUSION + CONTRASTIVE + AUTOENCODER
