"""docs/at_scale.md shows the tables that its program prints."""

from pathlib import Path

from benchmarks import at_scale, mesh_faults

DOCS = Path(__file__).parents[2] / "docs"


def test_tables_are_those_of_the_program() -> None:
    page = (DOCS / "at_scale.md").read_text(encoding="utf-8")
    for table in (at_scale.messages(), at_scale.snapshots()):
        assert "\n".join(table) in page


def test_more_ranks_cost_latency_and_few_bytes() -> None:
    assert at_scale.payload_bytes(150, 1000) - at_scale.payload_bytes(150, 8) == 160
    assert at_scale.ring(0, 1000)[0] > 90 * at_scale.tree(0, 1000)[0]


def test_faults_on_every_rank_are_those_of_the_stored_rows() -> None:
    assert mesh_faults.table() in (DOCS / "distributed.md").read_text(encoding="utf-8")
