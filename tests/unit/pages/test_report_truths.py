"""A page says only what was so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steadystep._utils.checklist import ChecklistItem
from steadystep.pages.dashboard import row
from steadystep.pages.heat_and_overlay import heat
from steadystep.pages.incident_groups import Headline
from steadystep.pages.report import view
from steadystep.pages.run_list import summary
from steadystep.runs.checklist import checklist
from steadystep.runs.diagnosis import diagnose
from steadystep.runs.run import LayerNorms, Run, Series
from tests.unit.pages.report_runs import made_incident, made_run, steadystep, write_log

OBSERVED = {"mode": "observe", "training": {"mixed_precision": "fp32"}, "monitoring": {}}
PLAIN = {"mode": "autopilot", "training": {"mixed_precision": "fp32"}, "monitoring": {}}
GOOD = Headline(said="fine", healthy=True)


def item(run: Run, name: str) -> ChecklistItem:
    return next(one for one in checklist(run) if one.name == name)


def with_rates(rates: Any, *, incidents: tuple[int, ...] = (), **changes: Any) -> Run:
    values = np.asarray(rates, dtype=np.float64)
    trouble = tuple(made_incident(step) for step in incidents)
    lr = Series(np.arange(len(values)), values)
    return made_run(len(values), troubled=False, lr=lr, incidents=trouble, **{"settings": PLAIN, **changes})


def test_models_without_biases_keep_all_their_layers() -> None:
    parts = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down", "n1", "n2")
    names = tuple(f"model.layers.{i}.{part}.weight" for i in range(16) for part in parts)
    told = heat(LayerNorms(steps=np.arange(3), names=names, norms=np.ones((3, len(names)))))
    assert told is not None
    assert len(told["names"]) <= 64
    assert "model.layers.15.mlp" in told["names"]


@pytest.mark.parametrize("form", ["weight{}", "layers.{}.weight"])
def test_where_names_do_not_help_neighbours_share_a_row(form: str) -> None:
    names = tuple(form.format(i) for i in range(150))
    norms = np.ones((3, 150))
    norms[:, 149] = 1e6
    told = heat(LayerNorms(steps=np.arange(3), names=names, norms=norms))
    assert told is not None
    assert 32 < len(told["names"]) <= 64
    assert "149" in told["names"][-1]
    assert told["rows"][-1][0] == pytest.approx(6.0)


def test_observing_is_not_intervening() -> None:
    run = made_run(400, settings=OBSERVED)
    assert item(run, "NaN check").state == "partial"
    assert item(made_run(400, settings=PLAIN), "NaN check").state == "present"
    facts = {name: (value, said) for name, value, said in view(run, GOOD).facts}
    assert facts["interventions"] == ("0", "2 observations")
    told = summary("a", run, GOOD, 0.0)
    assert (told.interventions, told.incidents) == (0, 2)
    assert row(told, 0.0)["tag"] == ("2 observations", "critical")


def test_holding_back_outliers_is_not_a_limit() -> None:
    run = made_run(400, settings=PLAIN, clipped=np.array([5, 6]))
    assert item(run, "gradient clipping").state == "partial"
    assert "clipped 0.5 % of the steps" in item(run, "gradient clipping").evidence
    assert item(made_run(400), "gradient clipping").state == "present"


def test_the_guards_own_cut_is_no_schedule() -> None:
    cut = np.full(1000, 1e-3)
    cut[900:] = 7e-4
    assert item(with_rates(cut, incidents=(899, 900)), "learning-rate schedule").state == "absent"
    assert item(with_rates(cut), "learning-rate schedule").state == "present"
    falling = 1e-3 * np.cos(np.arange(1000) / 700)
    assert item(with_rates(falling, incidents=(500,)), "learning-rate schedule").state == "present"
    assert item(with_rates(cut[850:], incidents=(2,)), "learning-rate schedule").state == "unknown"


def test_a_leap_is_neither_warm_up_nor_schedule() -> None:
    leap = np.full(600, 1e-3)
    leap[300:340] = 0.03
    for run in (with_rates(leap, incidents=(301,)), with_rates(leap, source="csv", settings={})):
        assert item(run, "warm-up").state == "absent"
        assert item(run, "learning-rate schedule").state == "absent"
    assert item(with_rates(np.minimum(leap, 2.5e-3)), "warm-up").state == "absent"
    warm = leap * np.minimum((np.arange(600) + 1) / 50, 1.0)
    assert item(with_rates(warm), "warm-up").evidence.endswith("until step 49")
    steps = np.repeat([1e-3, 1e-4], 300)
    assert item(with_rates(steps), "learning-rate schedule").state == "present"


def test_who_is_guarded_is_not_told_to_be() -> None:
    def advice(**changes: Any) -> str:
        return next(p.advice for p in diagnose(made_run(400, **changes)).findings if p.kind == "non-finite")

    assert "Guard" not in advice()
    assert "careful and autopilot" in advice(settings=OBSERVED)
    assert "steadystep.Guard" in advice(source="csv", settings={})


def test_words_that_utf8_cannot_say_do_not_stop_the_page(tmp_path: Path) -> None:
    with write_log(tmp_path, made_run(40)).open("a") as log:
        log.write(r'{"kind":"incident","step":39,"done":"\ud800","diagnosis":{"cause":"a\ud800b"}}' + "\n")
    assert steadystep("report", str(tmp_path)) == 0
    assert "a?b" in (tmp_path / "report.html").read_text(encoding="utf-8")
