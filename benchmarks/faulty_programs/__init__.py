"""Small faulty training programs, each with a working twin, and healthy programs that look strange."""

from benchmarks.faulty_programs.program import Program
from benchmarks.faulty_programs.text import TEXT
from benchmarks.faulty_programs.vision import VISION

PROGRAMS: tuple[Program, ...] = VISION + TEXT
