"""The published schema of `steadystep diagnose --json` is what the command prints."""

import json
from pathlib import Path
from typing import Any

import pytest

from steadystep.cli.diagnose import as_json_dict
from steadystep.runs.diagnosis import diagnose, headline
from steadystep.runs.run import Run
from tests.unit.pages.report_runs import made_incident, made_run

SCHEMA: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs" / "diagnose.schema.json").read_text())

RUNS = (
    made_run(steps=400),
    made_run(steps=400, troubled=False, settings={"mode": "observe"}, incidents=(made_incident(9),)),
    Run(name="empty", path=Path("a"), source="csv"),
)


def differences(schema: Any, value: Any, where: str = "") -> list[str]:
    """Keys that one has and the other has not."""
    if "properties" in schema and isinstance(value, dict):
        found = [f"{where}.{key}" for key in set(schema["properties"]) ^ set(value)]
        pairs = [(key, inner) for key, inner in schema["properties"].items() if key in value]
        return found + [d for key, inner in pairs for d in differences(inner, value[key], f"{where}.{key}")]
    if "items" in schema and isinstance(value, list):
        return [d for one in value for d in differences(schema["items"], one, f"{where}[]")]
    return []


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_output_has_the_keys_of_the_schema(run: Run) -> None:
    reading = diagnose(run)
    told = json.loads(json.dumps(as_json_dict(run, reading, headline(run, reading))))
    assert differences(SCHEMA["$defs"]["run"], told) == []
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(told, SCHEMA)
    jsonschema.validate([told, told], SCHEMA)
