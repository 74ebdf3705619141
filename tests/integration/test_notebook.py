"""A notebook, run as a person runs it: the second run of a cell, the live chart, tables and reprs."""

from pathlib import Path
from typing import Any

import pytest

CELLS = (
    "import torch, steadystep\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(4, 1)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.05)",
    "guard = steadystep.Guard(model, optimizer, run_dir='a', config={'monitoring': {'sinks': ['console']}})",
    "guard = steadystep.Guard(model, optimizer, run_dir='a', config={'monitoring': {'sinks': ['console']}})",
    "for step in range(60):\n"
    "    x = torch.randn(16, 4)\n"
    "    x[0] = float('nan') if step == 40 else 1.0\n"
    "    outcome = guard.step(lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(), batch=x)\n"
    "outcome",
    "guard.close()\nguard",
    "run = steadystep.read_run('a')\nrun",
    "run.to_pandas()",
)


@pytest.mark.slow  # a kernel that imports torch takes ten seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # of the notebook's own packages
def test_a_notebook(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs: list[list[Any]] = [cell.outputs for cell in notebook.cells]
    assert "the earlier guard of this run_dir is closed" in _text(outputs[2])
    trained = _text(outputs[3])
    assert trained.count("<polyline") == 3, "one chart, redrawn in place"
    assert trained.count("step 40: <b>non-finite-input</b>") == 1
    assert "steadystep: step 40" not in trained, "the logger does not repeat what the chart shows"
    assert "Outcome(step 59: loss" in trained
    assert "diagnosis" in _text(outputs[4])
    assert "Recovered: the guard intervened once (non-finite-input at step 40)" in _text(outputs[5])
    assert "grad_norm" in _text(outputs[6])


def _text(outputs: list[Any]) -> str:
    return "\n".join(str(one.get("text") or one.get("data")) for one in outputs)
