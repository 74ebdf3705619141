"""`check --fix`: which fixes are applied, that nothing else changes, and that a file is never lost or broken."""

import ast
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from steadystep.cli.app import app
from steadystep.errors import ConfigError
from steadystep.lint import RULES, check_script
from steadystep.lint import fix as fixing
from steadystep.lint.fix import fix_file, fix_script, unfixed
from steadystep.lint.patch import Replacement, apply, plain, replacements, split_lines
from steadystep.lint.repairs import SAFE, UNSAFE, fix_state
from tests.unit.lint.test_lint import EVERY_FAULTY, SCRIPTS, TEXTS, report

HEAD = """import torch
from torch import nn
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
"""
LATE = (
    HEAD
    + """for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""
)
FIXED = (
    HEAD
    + """for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
)


def codes(text: str) -> list[str]:
    return [hit.code for hit in check_script(text).hits]


def loop(*lines: str) -> str:
    """A training loop of these lines."""
    return HEAD + "for x, y in loader:\n" + "".join(f"    {line}\n" for line in lines)


@pytest.mark.slow
def test_every_fix_in_the_frozen_scripts_is_applied_or_has_a_reason() -> None:
    applied: dict[str, int] = {}
    others = [row for row in EVERY_FAULTY if row["code"] not in SAFE][::4]
    for row in (*(row for row in EVERY_FAULTY if row["code"] in SAFE), *others):
        text = (SCRIPTS / row["path"]).read_text(encoding="utf-8")
        fixed = fix_script(text, row["path"])
        ast.parse(fixed.text)
        before = report(row["path"])
        left = [hit.code for hit in fixed.report.hits]
        assert len(left) + len(fixed.applied) == len(before.hits), row["path"]
        assert set(fixed.reasons) == {hit for hit in fixed.report.hits if hit.diff}
        assert all(fixed.reasons.values())
        assert bool(fixed.diff) == bool(fixed.applied) == (fixed.text != text)
        assert not any(hit.code in UNSAFE for hit in fixed.applied)
        for hit in fixed.applied:
            applied[hit.code] = applied.get(hit.code, 0) + 1
            assert hit.code not in left
    assert set(applied) == SAFE
    assert sum(applied.values()) >= 70


def test_tables_name_rules() -> None:
    assert set(RULES) >= SAFE | set(UNSAFE)
    assert not SAFE & set(UNSAFE)


@pytest.mark.parametrize(
    ("lines", "fixed"),
    [
        (  # moved in front of the step, which needs it unscaled
            [
                "optimizer.zero_grad()",
                "scaler.scale(loss_fn(model(x), y)).backward()",
                "scaler.step(optimizer)",
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "scaler.update()",
            ],
            [
                "optimizer.zero_grad()",
                "scaler.scale(loss_fn(model(x), y)).backward()",
                "scaler.unscale_(optimizer)",
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "scaler.step(optimizer)",
                "scaler.update()",
            ],
        ),
        (  # two clips, one unscale_
            [
                "optimizer.zero_grad()",
                "scaler.scale(loss_fn(model(x), y)).backward()",
                "nn.utils.clip_grad_value_(model.parameters(), 1.0)",
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "scaler.step(optimizer)",
                "scaler.update()",
            ],
            [
                "optimizer.zero_grad()",
                "scaler.scale(loss_fn(model(x), y)).backward()",
                "scaler.unscale_(optimizer)",
                "nn.utils.clip_grad_value_(model.parameters(), 1.0)",
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "scaler.step(optimizer)",
                "scaler.update()",
            ],
        ),
        (  # past the scaler, which nothing updates
            ["optimizer.zero_grad()", "scaler.scale(loss_fn(model(x), y)).backward()", "optimizer.step()"],
            [
                "optimizer.zero_grad()",
                "scaler.scale(loss_fn(model(x), y)).backward()",
                "scaler.step(optimizer)",
                "scaler.update()",
            ],
        ),
        (  # a total stays a tensor
            [
                "optimizer.zero_grad()",
                "loss = loss_fn(model(x), y)",
                "loss.backward()",
                "optimizer.step()",
                "total += loss",
                "print(total.item())",
            ],
            [
                "optimizer.zero_grad()",
                "loss = loss_fn(model(x), y)",
                "loss.backward()",
                "optimizer.step()",
                "total += loss.detach()",
                "print(total.item())",
            ],
        ),
    ],
)
def test_what_comes_out(lines: list[str], fixed: list[str]) -> None:
    assert fix_script(loop(*lines)).text == loop(*fixed)
    assert codes(loop(*fixed)) == []


@pytest.mark.parametrize(
    ("lines", "code", "why"),
    [
        # two losses add up: clearing between them would drop the first
        (["a.backward()", "b = loss_fn(model(x), y)", "b.backward()", "optimizer.step()"], "SS106", "earlier backward"),
        # accumulation: the step is not in the block of the backward
        (
            ["loss = loss_fn(model(x), y)", "loss.backward()", "if ready(x):", "    optimizer.step()"],
            "SS106",
            "not in the same block",
        ),
        # on one line with the backward: in front of it there is nothing to unscale
        (
            [
                "optimizer.zero_grad()",
                "scaler.scale(f(x)).backward(); nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "scaler.step(optimizer)",
                "scaler.update()",
            ],
            "SS101",
            "more than one place",
        ),
        # the clip is in a branch and the step is not
        (
            [
                "optimizer.zero_grad()",
                "scaler.scale(f(x)).backward()",
                "if clip:",
                "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "scaler.step(optimizer)",
                "scaler.update()",
            ],
            "SS101",
            "not in the same block",
        ),
        # what is clipped is computed after the step
        (
            [
                "optimizer.zero_grad()",
                "loss = f(model(x))",
                "loss.backward()",
                "optimizer.step()",
                "params = list(model.parameters())",
                "nn.utils.clip_grad_norm_(params, 1.0)",
            ],
            "SS102",
            "same names",
        ),
        # two steps share the scaler
        (
            [
                "optimizer.zero_grad(); other.zero_grad()",
                "scaler.scale(f(model(x))).backward()",
                "scaler.step(optimizer)",
                "scaler.step(other)",
            ],
            "SS203",
            "more than once",
        ),
        # a second round in the same block, the first one unscaled
        (
            [
                "optimizer.zero_grad()",
                "scaler.scale(f(model(x))).backward()",
                "scaler.unscale_(optimizer)",
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "scaler.step(optimizer)",
                "scaler.update()",
                "optimizer.zero_grad()",
                "scaler.scale(g(model(x))).backward()",
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "scaler.step(optimizer)",
                "scaler.update()",
            ],
            "SS101",
            "elsewhere in the block",
        ),
        # two optimizers past the scaler: its update belongs after the second
        (
            [
                "optimizer.zero_grad(); other.zero_grad()",
                "scaler.scale(f(model(x))).backward()",
                "optimizer.step()",
                "other.step()",
            ],
            "SS204",
            "share the scaler",
        ),
        # on the way to its new place the iteration may end
        (
            [
                "optimizer.zero_grad()",
                "loss = f(model(x))",
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "if x is None:",
                "    continue",
                "loss.backward()",
                "optimizer.step()",
            ],
            "SS103",
            "leave the block",
        ),
        # the scale is taken out by hand
        (
            [
                "optimizer.zero_grad()",
                "scaler.scale(f(model(x))).backward()",
                "for p in ps: p.grad = p.grad * k",
                "optimizer.step()",
            ],
            "SS204",
            "by hand",
        ),
    ],
)
def test_what_is_left_alone(lines: list[str], code: str, why: str) -> None:
    text = loop(*lines)
    fixed = fix_script(text)
    reasons = {hit.code: said for hit, said in fixed.reasons.items()}
    assert why in reasons[code]
    assert fixed.text == text
    assert not fixed.diff


EVALUATION = (SCRIPTS / "judge/faulty/graph_in_validation.py").read_text(encoding="utf-8")


def test_a_loop_with_a_text_over_several_lines_is_not_indented() -> None:
    long = EVALUATION.replace("output = model(data)", 'output = model(data)\n        print("""a\nb""")')
    (why,) = fix_script(long).reasons.values()
    assert "several lines" in why
    assert fix_script(long.replace("a\nb", "ab")).applied


def test_torch_under_another_name() -> None:
    assert fix_script(EVALUATION).applied
    (why,) = fix_script(EVALUATION.replace("import torch\n", "import torch as th\n")).reasons.values()
    assert "not imported" in why


def test_an_ignored_hit_and_one_that_was_not_selected_are_not_fixed() -> None:
    silent = LATE.replace("1.0)", "1.0)  # steadystep: ignore[SS102]")
    assert fix_script(silent).text == silent
    assert fix_script(LATE, wanted=lambda code: code != "SS102").text == LATE
    assert fix_script(LATE, wanted=lambda code: code == "SS102").text == FIXED


def test_a_fix_that_leads_to_another_fault_is_refused() -> None:
    text = loop(
        "optimizer.zero_grad()",
        "scaler.scale(loss_fn(model(x), y)).backward()",
        "scaler.step(optimizer)",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "scaler.update()",
    )
    fixed = fix_script(text, wanted=lambda code: code == "SS102")
    assert list(fixed.reasons.values()) == ["it would lead to SS101"]
    assert fixed.text == text


def test_a_fix_that_does_not_help_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixing, "edits", lambda hit: ())
    fixed = fix_script(LATE)
    assert list(fixed.reasons.values()) == ["the fault would remain"]
    assert fixed.text == LATE


def test_an_optimizer_is_made_after_the_line_that_moves_its_model() -> None:
    rest = "for x, y in loader:\n    optimizer.zero_grad()\n    f(model(x)).backward()\n    optimizer.step()\n"
    made = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    start, move = "import torch\nmodel = torch.nn.Linear(2, 2)\n", 'model = model.to("cuda")\n'
    assert fix_script(start + made + move + rest).text == start + move + made + rest


@given(st.sampled_from(TEXTS), st.data())
def test_edited_scripts_stay_python(text: str, data: st.DataObject) -> None:
    """Whatever the script: what comes out parses, has fewer hits, and no kind of hit that was not there."""
    lines = text.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at, to = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        if data.draw(st.booleans()):
            lines.insert(to, lines[at])
        else:
            lines[at], lines[to] = lines[to], lines[at]
    edited = "\n".join(lines)
    try:
        ast.parse(edited)
    except SyntaxError:
        return
    fixed = fix_script(edited)
    ast.parse(fixed.text)
    before, after = codes(edited), [hit.code for hit in fixed.report.hits]
    assert len(after) <= len(before) - bool(fixed.applied)
    assert all(after.count(code) <= before.count(code) for code in after)
    assert codes(fixed.text) == after


# Lines


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", [True, False])
def test_bytes_outside_the_fix_are_kept(ending: str, bom: bytes, last: bool, tmp_path: Path) -> None:
    def stored(text: str) -> bytes:
        text = text.replace("    ", "\t").replace("lr=0.1)", "lr=0.1)  # été 学习率")
        return bom + (text if last else text[:-1]).replace("\n", ending).encode()

    path = tmp_path / "train.py"
    path.write_bytes(stored(LATE))
    assert [hit.code for hit in fix_file(path).applied] == ["SS102"]
    assert path.read_bytes() == stored(FIXED)


def test_mixed_line_endings_stay_mixed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    lines = LATE.splitlines()
    raw = "".join(line + ("\r\n" if n % 2 else "\n") for n, line in enumerate(lines))
    path.write_bytes(raw.encode())
    assert fix_file(path).applied
    new = split_lines(path.read_bytes().decode())
    assert plain(path.read_bytes().decode()) == FIXED
    assert new[:9] == split_lines(raw)[:9]


def test_a_form_feed_does_not_shift_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("\x0c\n" + LATE)
    fixed = fix_file(path)
    ast.parse(path.read_text())
    assert path.read_text() in ("\x0c\n" + LATE, "\x0c\n" + FIXED)
    assert bool(fixed.applied) == (path.read_text() == "\x0c\n" + FIXED)


def test_taking_a_diff_apart() -> None:
    diff = check_script(LATE).hits[0].diff
    assert apply(LATE, replacements(diff)) == FIXED
    assert apply("else\n" * 20, replacements(diff)) is None
    assert replacements("--- a\n+++ b\n@@ -0,0 +1 @@\n+x") == (Replacement(first=1, old=(), new=("x",)),)
    assert apply("", (Replacement(first=1, old=(), new=("x",)),)) == "x\n"
    assert apply("a\nb", (Replacement(first=3, old=(), new=("c",)),)) == "a\nb\nc"
    assert apply("a\r\nb", (Replacement(first=2, old=("b",), new=("c", "d")),)) == "a\r\nc\r\nd"
    assert apply("a\n", (Replacement(first=4, old=(), new=("c",)),)) is None


# Files


def test_mode_and_link_are_kept(tmp_path: Path) -> None:
    path, link = tmp_path / "real.py", tmp_path / "link.py"
    path.write_text(LATE)
    path.chmod(0o750)
    link.symlink_to("real.py")
    fix_file(link)
    assert path.read_text() == FIXED
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.py", "real.py"]


def test_a_read_only_file_is_an_error_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LATE)
    path.chmod(0o444)
    with pytest.raises(ConfigError, match=r"train\.py: not fixed: the file is read-only"):
        fix_file(path)
    assert path.read_text() == LATE
    done = run(str(path), "--fix")
    assert done.exit_code == 1
    assert "error:" in done.stderr
    assert "SS102" in done.stdout
    assert "0 fixed" in done.stdout


def test_a_file_that_was_changed_meanwhile_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text(LATE)
    real = fixing.fix_script

    def slow(*given: object, **named: object) -> fixing.Fixed:
        path.write_text("mine = 1\n")
        return real(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(fixing, "fix_script", slow)
    with pytest.raises(ConfigError, match="changed while it was being checked"):
        fix_file(path)
    assert path.read_text() == "mine = 1\n"
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LATE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # bytes: writing more fails as on a full disk

    command = [sys.executable, "-B", "-m", "steadystep", "check", "--fix", "--no-checklist", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 1
    assert done.stderr == "error: train.py: not fixed: cannot be written (File too large)\n"
    assert path.read_text() == LATE
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


# The command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments])


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LATE)
    done = run(str(path), "--fix", "--dry-run", "--no-checklist")
    assert done.exit_code == 1
    assert "would fix SS102" in done.output
    assert "+    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n     optimizer.step()" in done.output
    assert done.output.count("gradients are clipped after") == 1
    assert "1 fault, 1 would be fixed" in done.output
    assert path.read_text() == LATE
    assert isinstance(run(str(path), "--dry-run").exception, ConfigError)


def test_fix_on_a_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text(LATE)
    (tmp_path / "b.py").write_text(LATE + "loss.item().backward()\n")
    (tmp_path / "broken.py").write_text("for in x:\n")
    (tmp_path / "dir.py").mkdir()
    os.symlink("loop.py", tmp_path / "loop.py")
    done = run(str(tmp_path), "--fix", "--json")
    told = json.loads(done.stdout)
    assert [len(r.get("fixed", ())) for r in told["reports"]] == [1, 1]
    assert [r["diff"][:4] for r in told["reports"]] == ["--- ", "--- "]
    assert len(told["errors"]) == 2
    assert (tmp_path / "sub" / "a.py").read_text() == FIXED
    assert (tmp_path / "b.py").read_text().startswith(FIXED)
    assert (tmp_path / "broken.py").read_text() == "for in x:\n"


def test_after_fixing_there_is_nothing_to_fix(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LATE)
    assert "1 can be fixed with --fix" in run(str(path)).output
    first = run(str(path), "--fix", "--no-checklist")
    assert (first.exit_code, first.output.splitlines()[-1]) == (0, "no faults, 1 fixed")
    again = run(str(path), "--fix", "--no-checklist")
    assert (again.exit_code, again.output) == (0, "no faults, 0 fixed\n")


def test_a_fix_that_is_not_applied_says_why(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = LATE.replace("1.0", "1e-9")
    path.write_text(text)
    done = run(str(path), "--fix")
    assert done.exit_code == 1
    assert "= not applied: it changes a setting" in done.output
    found = check_script(text)
    assert [fix_state(hit, text) for hit in found.hits] == ["safe", "unsafe"]
    left = unfixed(found, fix_script(text))
    assert [(hit.code, why) for hit, why in left.items()] == [("SS503", "it changes a setting")]
