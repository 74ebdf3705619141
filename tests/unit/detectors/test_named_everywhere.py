"""A detector of ours has a typed name, a schema of its state, a contract test and a line in the docs."""

import re
from pathlib import Path

from steadystep import detectors
from steadystep.detectors import OddReplica, ZeroGradient
from steadystep.records import DetectorName
from steadystep.state.detectors import DETECTORS
from steadystep.testing import check_detector
from tests.unit.detectors.test_detector_contract import FACTORIES, SILENT

PAGE = Path(__file__).parents[3] / "docs" / "detectors.md"
WRAPPERS = {"Cooldown", "Detector"}
KINDS = [getattr(detectors, name) for name in detectors.__all__ if name not in WRAPPERS]
NAMES = {kind.name for kind in KINDS if isinstance(kind, type)}


def test_typed_names() -> None:
    assert {value for name, value in vars(DetectorName).items() if name.isupper()} == NAMES


def test_schemas_of_states() -> None:
    assert set(DETECTORS) == NAMES


def test_contract_tests() -> None:
    assert (FACTORIES | SILENT).keys() & NAMES == NAMES - {"odd-replica", "zero-gradient"}

    check_detector(OddReplica)
    check_detector(ZeroGradient, nan_leaves_no_trace=False)  # it counts steps


def test_lines_in_the_docs() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([a-z-]+)`", " ".join(rows))) >= NAMES
