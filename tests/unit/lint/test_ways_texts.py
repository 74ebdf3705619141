"""Faults as different people write them, and training code in many styles that is right.

The snippets are in `tests/data/lint/ways`: each begins with `###`, the code of its fault if it has one, and
what it is about.
"""

from pathlib import Path

import pytest

from steadystep.lint import check_script

WAYS = Path(__file__).parents[2] / "data" / "lint" / "ways"
HEAD = """import copy, math
from contextlib import contextmanager
from functools import partial
import torch
import torch.nn as nn
import torch.nn.functional as F
from data import loader, train_loader, val_loader, test_loader, loaders, Net, VGG, Generator, Discriminator
"""


def _snippets(kind: str) -> list[tuple[str, str]]:
    """(title, text) of all of one kind."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(WAYS.glob(f"{kind}_*.txt"))]
    parts = [part.partition("\n") for text in texts for part in text.split("### ")[1:]]
    return [(title, body) for title, _, body in parts]


@pytest.mark.parametrize(("title", "text"), _snippets("faulty"), ids=lambda value: value[:40].partition("\n")[0])
def test_the_fault_is_found_once(title: str, text: str) -> None:
    assert [hit.code for hit in check_script(HEAD + text).faults] == [title.split()[0]]


@pytest.mark.parametrize(("title", "text"), _snippets("clean"), ids=lambda value: value[:40].partition("\n")[0])
def test_what_is_right_gets_no_hit(title: str, text: str) -> None:
    assert [(hit.code, hit.message) for hit in check_script(HEAD + text).faults] == []


def test_the_snippets_are_there() -> None:
    assert len(_snippets("faulty")) == 230
    assert len(_snippets("clean")) == 204
