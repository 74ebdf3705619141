import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadystep.incidents.bundle import write_bundle
from steadystep.pages import _SPARED, _asset, island, script, style, template_engine
from steadystep.pages.charts import panels
from steadystep.pages.heat_and_overlay import HUES, heat, heats, overlay
from steadystep.pages.incident_groups import Headline, Mark, headline, incident_groups
from steadystep.pages.report import compare_page, report_page, view
from steadystep.pages.run_list import summary
from steadystep.runs.checklist import checklist
from steadystep.runs.comparison import compare
from steadystep.runs.run import LayerNorms, Run, Series
from tests.unit.pages.report_runs import long_run, made_incident, made_run, steadystep, write_log

GOOD = Headline(said="All is well.", healthy=True)
EVIL = "<script>alert(1)</script><!-- ' \" & \u2028 {{7*7}} </script>"


class Parsed(HTMLParser):
    """The page as a browser would take it apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def drawn_in(page: str) -> dict[str, Any]:
    data = re.search(r'id="run-data">(.*?)</script>', page, re.S)
    assert data is not None
    charts: dict[str, Any] = json.loads(data[1])
    return charts


def test_episodes_are_one_story_each_with_numbers_before_and_after() -> None:
    told = incident_groups(made_run())
    assert [(e.first, e.last, e.cause, e.severity) for e in told] == [
        (1500, 1500, "exploding-gradient", "act"),
        (2250, 2252, "damaged-weights", "critical"),
    ]
    # Each of the three refused steps restores 20 updates before the first: 21, and two steps that were not applied.
    assert [e.cost for e in told] == ["", "23 updates lost"]
    assert told[1].cost in report_page(made_run())
    loss, norm, _ = told[1].changes
    assert (loss.name, loss.at) == ("loss", "NaN")
    assert float(loss.before) == pytest.approx(2.0, abs=0.1)
    assert float(loss.after) == pytest.approx(2.0, abs=0.1)
    assert told[0].changes[1].at == "40"
    assert told[1].replay == "steadystep replay runs/a/incidents/x --factory package.module:make"
    assert told[0].replay == ""
    assert norm.at == "NaN"


def test_far_apart_or_of_another_cause_is_another_episode() -> None:
    steps = (
        made_incident(10),
        made_incident(20),
        made_incident(60),
        made_incident(61, cause="bad-batch", severity="warn"),
    )
    assert [(e.first, e.last) for e in incident_groups(made_run(100, troubled=False, incidents=steps))] == [
        (10, 20),
        (60, 60),
        (61, 61),
    ]


def test_what_one_led_to_is_the_same_story_told_by_its_end() -> None:
    steps = (
        made_incident(10, cause="non-finite-loss"),
        made_incident(11, restored=5),
        made_incident(30, cause="other"),
    )
    told = incident_groups(made_run(100, troubled=False, incidents=steps))
    assert [(e.first, e.last, e.cause) for e in told] == [(10, 11, "damaged-weights"), (30, 30, "other")]


def test_the_verdict_tells_what_the_guard_did() -> None:
    told = headline(made_run(3000))
    assert told.healthy
    assert told.said == (
        "Recovered: the guard intervened 2 times (exploding-gradient at step 1,500, damaged-weights at step "
        "2,250); the curves show no other instability."
    )
    watched = headline(made_run(3000, settings={"mode": "observe"}))
    assert not watched.healthy
    assert "guard" not in watched.said
    lost = made_run(3000)
    lost.loss.values[2400:] = np.nan
    assert not headline(lost).healthy
    assert "The guard intervened 2 times" in headline(lost).said


def test_panels_show_what_there_is() -> None:
    run = made_run(metrics={"kl": Series(np.arange(5), np.ones(5))})
    assert [panel["key"] for panel in panels(run)] == ["loss", "norm", "lr", "m-kl"]
    loss = panels(run)[0]
    assert [line["name"] for line in loss["lines"]] == ["loss", "typical", "validation"]
    assert [2250, "NaN"] in loss["lines"][0]["bad"]
    assert panels(Run(name="x", path=Path("x"), source="csv")) == ()


def test_what_was_refused_is_drawn_apart() -> None:
    skipped = made_incident(1500, stepped=False, refused_lr=0.5)
    loss, norm, lr = panels(made_run(incidents=(skipped,)))
    assert (loss["ghosts"], norm["ghosts"], lr["ghosts"]) == ([[1500, 9.0]], [[1500, 40.0]], [[1500, 0.5]])
    assert 1500 not in loss["lines"][0]["x"]
    assert loss["log"] is False, "the axis is made for what went into the weights"
    assert incident_groups(made_run(incidents=(skipped,)))[0].changes[2].at == "0.5 refused, 8.78e-04 used"
    assert panels(made_run())[0]["ghosts"] == [], "an update that was scaled down was applied"


def test_the_layer_that_moved_first_is_named() -> None:
    steps = np.r_[np.arange(0, 1500, 100), np.arange(1495, 1501)]
    norms = np.ones((len(steps), 4))
    norms[-3:, 2], norms[-2:, 1], norms[-1] = 9.0, 50.0, 100.0
    layers = LayerNorms(steps=steps, names=("a.w", "b.w", "c.w", "d.w"), norms=norms)
    run = made_run(layers=layers)
    assert incident_groups(run)[0].mover == "c.w"
    (picture,) = heats(run, incident_groups(run))
    assert picture["movers"] == [[1500, 2]]
    norms[-3:] = 100.0
    assert incident_groups(run)[0].mover == "", "all at once: none was first"


def test_the_samples_of_a_refused_batch_are_listed(tmp_path: Path) -> None:
    write_bundle(tmp_path / "in", name="one", step=1, updates=1, record={}, batch={"index": torch.tensor([7, 3])})
    write_bundle(tmp_path.parent / "out", name="one", step=1, updates=1, record={}, batch={"index": [1]})
    for bundle, samples in (("in/one", (7, 3)), ("../out/one", ()), ("none", ())):
        incidents = (made_incident(5, bundle=str(tmp_path / bundle)),)
        run = made_run(100, path=tmp_path, incidents=incidents)
        assert incident_groups(run)[0].samples == samples
        assert ("by index: <code>7, 3</code>" in report_page(run, GOOD)) == bool(samples)


def test_ranks_come_from_the_record_and_not_from_a_text() -> None:
    incidents = (made_incident(5, ranks=(5, 3), evidence="on rank 7"), made_incident(6, ranks=(3,)))
    (group,) = incident_groups(made_run(100, incidents=incidents))
    assert group.ranks == (3, 5)


def test_text_has_enough_contrast_in_both_themes() -> None:
    light = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", _asset("base.css")))
    text = {"ink": ("ground", "paper", "good-wash", "act-wash"), "soft": ("ground", "paper", "sunk", "wash")}
    text |= {"faint": ("ground", "paper", "sunk"), "accent": ("ground", "paper", "wash"), "paper": ("accent",)}
    text |= {name: ("paper", f"{name}-wash") for name in ("critical", "act", "warn", "good")}
    for theme in (light, light | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", _asset("dark.css")))):
        thin_text = [(a, b) for a, grounds in text.items() for b in grounds if contrast(theme[a], theme[b]) < 4.5]
        lines = ("train", "held", "norm", "rate", *(f"c{i}" for i in range(HUES)))
        assert (thin_text, [a for a in lines if contrast(theme[a], theme["paper"]) < 3]) == ([], [])


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


def test_a_wide_loss_gets_a_logarithmic_axis() -> None:
    wide = Series(np.arange(100), np.r_[np.ones(99), 1e5])
    assert panels(made_run(loss=wide))[0]["log"] is True
    assert panels(made_run(troubled=False))[0]["log"] is False


def test_heat_keeps_a_spike_and_marks_what_is_not_finite() -> None:
    norms = np.ones((1000, 2))
    norms[500, 1], norms[700, 0], norms[800, 0], norms[900, 1] = 1e4, np.inf, np.nan, np.nan
    told = heat(LayerNorms(steps=np.arange(1000), names=("a", "b"), norms=norms), troubled={900})
    assert told is not None
    assert max(v for v in told["rows"][1] if v is not None) == 4.0
    assert {row for _, row in told["bad"]} == {0, 1}
    assert len(told["bad"]) == 2, "a NaN where nothing went wrong is a layer that was not there"
    json.dumps(told, allow_nan=False)


def test_many_layers_are_put_together_by_module() -> None:
    names = tuple(f"blocks.{i}.{part}" for i in range(40) for part in ("up.weight", "up.bias", "down.weight"))
    told = heat(LayerNorms(steps=np.arange(3), names=names, norms=np.full((3, 120), 3.0)))
    assert told is not None
    assert told["names"][:2] == ["blocks.0", "blocks.1"]
    assert told["rows"][0][0] == pytest.approx(np.log10(np.sqrt(27)), abs=0.01)
    assert heat(None) is None


def test_the_checklist_reads_settings_and_else_curves() -> None:
    states = {item.name: item.state for item in checklist(made_run())}
    assert states.pop("incidents") == "partial"
    assert set(states.values()) == {"present"}
    assert len(states) == 8
    foreign = made_run(source="csv", settings={}, layers=None, clipped=np.empty(0, dtype=np.int64))
    seen = {item.name: item for item in checklist(foreign)}
    assert seen["warm-up"].state == "present"
    assert "rose from" in seen["warm-up"].evidence
    assert seen["checkpoints"].state == "unknown"
    assert seen["NaN check"].state == "partial"
    off = made_run(
        settings={"training": {"gradient_clipping": False}, "monitoring": {"save_checkpoints": None, "x": 1}}
    )
    assert {item.name: item.state for item in checklist(off)}["gradient clipping"] == "partial"


def test_the_page_says_it_all() -> None:
    page = report_page(made_run(name="a run"), GOOD)
    text = " ".join(" ".join(Parsed(page).text).split())
    for said in (
        "a run",
        "All is well.",
        "damaged-weights",
        "rolled back to step 20",
        "lr_scheduler = cosine",
    ):
        assert said in text
    assert "steadystep replay runs/a/incidents/x" in text
    assert len(page) < 1_000_000


def test_nothing_is_fetched_and_only_our_own_script_may_run() -> None:
    page = Parsed(report_page(made_run(), GOOD))
    for tag, attributes in page.tags:
        assert not {"src", "srcset", "style", "onload", "onclick"} & set(attributes), tag
        assert tag not in {"link", "iframe", "img", "object", "base"}
    policy = next(a["content"] or "" for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy


def test_what_comes_from_a_log_is_only_text() -> None:
    incident = made_incident(
        5, cause=EVIL, evidence=EVIL, advice=EVIL, done=EVIL, origin=EVIL, bundle=EVIL, severity=EVIL
    )
    sign = Mark(kind=EVIL, severity="warn", step=1, until=None, evidence=EVIL, advice=EVIL)
    run = made_run(
        100,
        name=EVIL,
        incidents=(incident,),
        settings={EVIL: EVIL, "training": {EVIL: [EVIL]}},
        notes=(EVIL,),
        metrics={EVIL: Series(np.arange(3), np.ones(3))},
        layers=LayerNorms(steps=np.arange(2), names=(EVIL,), norms=np.ones((2, 1))),
        error=EVIL,
    )
    page = report_page(run, Headline(said=EVIL, healthy=False, signs=(sign,)))
    parsed = Parsed(page)
    assert [tag for tag, _ in parsed.tags if tag == "script"] == ["script", "script"]
    assert page.count("<script") == page.count("</script>") == 2
    charts = drawn_in(page)
    assert charts["heats"][0]["names"] == [EVIL]
    assert charts["marks"][0]["cause"] == EVIL
    assert "49" not in "".join(parsed.text[:8])


def test_json_in_a_page_cannot_end_its_element() -> None:
    assert "<" not in island(EVIL)
    assert json.loads(island([EVIL, "\u2029"])) == [EVIL, "\u2029"]
    with pytest.raises(ValueError, match="Out of range"):
        island(float("nan"))


def test_our_own_files_cannot_end_their_elements_either() -> None:
    for without in (frozenset[str](), *_SPARED.values()):
        assert "</script" not in script(without).lower()
    assert "</style" not in style().lower()
    assert template_engine().autoescape is True


def test_a_run_with_next_to_nothing_has_a_page() -> None:
    empty = Run(name="empty", path=Path("x"), source="csv")
    assert "empty" in report_page(empty, GOOD)
    nan = Series(np.arange(3), np.full(3, np.nan))
    bad = Run(name="bad", path=Path("x"), source="csv", loss=nan, grad_norm=nan, lr=nan, validation={"val_loss": nan})
    assert "NaN" in report_page(bad, GOOD)


ANY = st.sampled_from([0.0, -1.0, 1e308, -1e308, 5e-324, np.nan, np.inf, -np.inf, 2.5]) | st.floats()


@given(st.lists(st.tuples(st.integers(0, 2**62 - 1), ANY), max_size=60))
@settings(max_examples=25)
def test_any_numbers_make_a_page(points: list[tuple[int, float]]) -> None:
    points.sort(key=lambda point: point[0])
    curve = Series(np.array([s for s, _ in points], dtype=np.int64), np.array([v for _, v in points], dtype=np.float64))
    layers = LayerNorms(steps=curve.steps, names=("a",), norms=curve.values[:, None])
    steps = tuple(made_incident(step) for step in curve.steps.tolist()[:5])
    run = made_run(
        50, loss=curve, grad_norm=curve, lr=curve, validation={"val_loss": curve}, layers=layers, incidents=steps
    )
    assert "All is well." in report_page(run, GOOD)
    assert summary("x", run, GOOD, 0.0).spark.heights.replace(".", "0").isalnum() or not np.isfinite(curve.values).any()
    if len(curve):
        assert compare([run, run]).runs[0].incidents == run.num_incidents


def test_a_long_run_carries_every_step_around_its_incidents() -> None:
    told = view(made_run(20_000), GOOD, buckets=300)
    near = told.charts["near"][10_000]["panels"][0]["lines"][0]
    assert 9_970 in near["x"]
    assert 10_000 in near["x"]
    assert len(told.charts["panels"][0]["lines"][0]["x"]) < 1000


def test_a_page_of_a_very_long_run_is_small() -> None:
    run = long_run()
    page = report_page(run)
    assert len(page.encode()) < 300_000
    charts = drawn_in(page)
    for packed, plain in zip(charts["panels"], panels(run), strict=True):
        for line, told in zip(packed["lines"], plain["lines"], strict=True):
            by = line["x"]["by"]
            apart = by if isinstance(by, list) else [by] * (len(told["x"]) - 1)
            assert np.cumsum([line["x"]["from"], *apart]).tolist() == told["x"]
    assert charts["panels"][-1]["lines"][1]["name"] == "typical", "a metric has a line through its noise"


def test_like_findings_are_told_once_and_a_recovered_run_is_not_shaded() -> None:
    mark = {"kind": "spike-healed", "severity": "warn", "until": 9, "advice": "", "evidence": "the loss rose"}
    signs = (*(Mark(step=step, **mark) for step in range(12)), Mark(step=5, **{**mark, "kind": "plateau"}))
    ill = view(made_run(100), Headline(said="Problem", healthy=False, signs=signs))
    assert [(sign.kind, len(more)) for sign, more in ill.signs] == [("spike-healed", 11), ("plateau", 0)]
    assert len(ill.charts["signs"]) == 13
    page = report_page(made_run(100), Headline(said="Recovered", healthy=True, signs=signs))
    assert page.count("the loss rose") == 2
    assert "And 11 more like it, at steps 1, 2, 3, 4, 5, 6, 7, 8 …" in page
    assert drawn_in(page)["signs"] == []


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "a", made_run(300))
    assert steadystep("report", str(tmp_path / "a")) == 0
    assert "exploding-gradient" in (tmp_path / "a" / "report.html").read_text()
    assert steadystep("report", str(tmp_path / "a"), "--out", str(tmp_path / "no" / "x.html")) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_command_reads_other_tools_logs_and_says_what_it_cannot(tmp_path: Path) -> None:
    table = tmp_path / "log.csv"
    table.write_text("step,loss,lr\n" + "".join(f"{i},{3 - i / 100},0.001\n" for i in range(100)))
    assert steadystep("report", str(table)) == 0
    assert "log" in (tmp_path / "log.report.html").read_text()
    assert steadystep("report", str(tmp_path / "nothing")) == 2


def test_a_page_needs_no_torch(tmp_path: Path) -> None:
    write_log(tmp_path, made_run(100))
    code = (
        "import sys; from steadystep.cli.app import main\n"
        f"sys.argv = ['steadystep', 'report', {str(tmp_path)!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


def test_fifty_runs_make_a_small_page_with_lines_that_differ() -> None:
    runs = [
        made_run(600, name=f"run-{i}", seed=i, troubled=False, hparams={"lr": 10 ** -(1 + i / 10), "opt": "ab"[i % 2]})
        for i in range(50)
    ]
    page = compare_page(runs)
    assert len(page) < 300_000
    charts = drawn_in(page)
    assert len({run["look"] for run in charts["runs"]}) == 50
    assert [(axis["name"], axis["kind"]) for axis in charts["parallel"]] == [
        ("lr", "log"),
        ("opt", "word"),
        ("held-out loss", "number"),
    ]
    assert "<code>lr</code>" in page
    assert overlay(runs[:2])["panels"][0]["lines"][0]["role"] == "c0 d0 raw", "of a few the noise is drawn too"
