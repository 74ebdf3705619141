"""There is one checklist: `steadystep check RUN` and the report page say the same about a run, item by item."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steadystep._utils.checklist import MARKS, ItemName
from steadystep.config import Config
from steadystep.lint.configs import check_config
from steadystep.runs.checklist import checklist
from steadystep.runs.run import Run, Series
from tests.unit.pages.report_runs import made_incident, made_run, steadystep, write_log

OBSERVED = {"mode": "observe", "training": {"mixed_precision": "fp32"}, "monitoring": {"save_checkpoints": False}}
SHORT = {"mode": "autopilot", "training": {"warmup_steps": 20, "total_steps": 10_000}, "monitoring": {}}
LIMIT = {"training": {"max_grad_norm": 1.0}}
ROW = re.compile(r'<tr><td class="mark-([\w-]+)"[^>]*>(.)</td><td>([^<]*)</td><td class="soft">([^<]*)</td></tr>')


def case(name: str) -> Run:
    rates, changes = np.full(1000, 1e-3), {"settings": LIMIT}
    if name == "all there":
        return made_run(1000, clipped=np.array([5, 6]))
    if name == "observe":
        return made_run(1000, settings=OBSERVED)
    if name == "no settings":
        return made_run(1000, settings={}, layers=None)
    if name == "short warm-up, NaN let through":
        return made_run(1000, settings=SHORT, incidents=())
    if name == "clipped all the time":
        changes = {"clipped": np.arange(1000)}
    elif name == "cut by the guard":
        rates[900:] = 7e-4
        changes |= {"incidents": (made_incident(899), made_incident(900))}
    elif name == "falls":
        rates = np.linspace(1e-3, 1e-5, 1000)
    elif name == "warm-up with a wobble":
        rates[:50] = np.linspace(1e-5, 1e-3, 50)
        rates[20] = rates[19]
    return made_run(1000, troubled=False, lr=Series(np.arange(1000), rates), **changes)


CASES = [
    "all there",
    "observe",
    "no settings",
    "short warm-up, NaN let through",
    "clipped all the time",
    "cut by the guard",
    "falls",
    "warm-up with a wobble",
]


def said(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert steadystep("check", str(folder), "--json") == 0
    return list(json.loads(capsys.readouterr().out)["reports"][0]["checklist"])


@pytest.mark.parametrize("name", CASES)
def test_check_and_the_report_say_the_same(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    write_log(folder, case(name))
    checked = said(folder, capsys)
    page = tmp_path / "page.html"
    assert steadystep("report", str(folder), "--out", str(page)) == 0
    shown = [tuple(map(unescape, row)) for row in ROW.findall(page.read_text(encoding="utf-8"))]
    capital = [(i["state"], MARKS[i["state"]], i["name"][0].upper() + i["name"][1:], i["evidence"]) for i in checked]
    assert shown == capital
    assert len(shown) == 9
    order = list(ItemName)
    assert sorted(checked, key=lambda item: order.index(item["name"])) == checked


def states(run: Run) -> dict[str, str]:
    return {item.name: item.state for item in checklist(run)}


def test_settings_and_curves_decide(tmp_path: Path) -> None:
    assert states(case("observe"))["NaN check"] == "partial"
    assert states(case("observe"))["gradient clipping"] == "absent"
    assert states(case("observe"))["mixed precision"] == "not-needed"
    assert states(case("no settings"))["mixed precision"] == "unknown"
    assert states(case("all there"))["NaN check"] == "present", "every NaN was refused"
    assert states(case("short warm-up, NaN let through"))["NaN check"] == "partial"
    assert states(case("short warm-up, NaN let through"))["warm-up"] == "partial"
    assert states(case("clipped all the time"))["gradient clipping"] == "partial"
    assert states(case("cut by the guard"))["learning-rate schedule"] == "absent"


def test_the_folder_decides_about_checkpoints(tmp_path: Path) -> None:
    asked = case("all there")
    assert states(asked)["checkpoints"] == "present", "the settings, where there is no folder"
    assert states(made_run(1000, path=tmp_path))["checkpoints"] == "partial", "asked for and not there"
    assert states(made_run(1000, path=tmp_path, settings=OBSERVED))["checkpoints"] == "absent"
    (tmp_path / "checkpoints" / "step-000100").mkdir(parents=True)
    assert states(made_run(1000, path=tmp_path, settings=OBSERVED))["checkpoints"] == "present"


@pytest.mark.parametrize("setting", ["{}", "mode: observe", "training: {max_grad_norm: 1.0, warmup_steps: 20}"])
def test_a_config_and_the_run_it_made_agree(setting: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(setting)
    run = made_run(10, troubled=False, settings=Config.load(file).model_dump(mode="json"))
    wanted = {item.name: item.state for item in check_config(file).items}
    found = states(run)
    assert {name: found[name] for name in wanted} == wanted
