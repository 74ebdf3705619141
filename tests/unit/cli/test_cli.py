"""The command as a person runs it: in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steadystep.version import __version__


def steadystep(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "steadystep", *arguments]
    env = {**os.environ, "COLUMNS": "100", **env}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)


def test_version_and_help() -> None:
    assert steadystep("--version").stdout == f"steadystep {__version__}\n"
    shown = steadystep("--help")
    assert shown.returncode == 0
    assert "demo" in shown.stdout
    assert "Example: steadystep demo" in steadystep("demo", "--help").stdout


CHEAP = (
    *(["--help"], ["--version"], [], ["wrong"], ["train"], ["train", "--help"], ["train", "missing.yaml"]),
    *(["train", "wrong.yaml"], ["replay", "missing", "--factory", "a:b"], ["replay", "missing"]),
    *(["find-lr", "missing"], ["examine", "missing"], ["examine", "missing:make"], ["bench", "missing"]),
    *(["demo", "--steps", "3"], ["diagnose", "missing"], ["compare", "a", "b"], ["report", "missing"]),
    *(["dashboard", "missing"], ["check", "missing.py"], ["mcp", "missing"], ["train", "--new", "new-"]),
)


@pytest.mark.slow
def test_a_mistake_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("task: gpt\ntraining: {total_step: 3}\n")
    code = (
        "import sys\n"
        "from steadystep.cli.app import main\n"
        f"for arguments in {CHEAP!r}:\n"
        "    sys.argv = ['steadystep', *arguments]\n"
        "    try:\n        main()\n    except SystemExit:\n        pass\n"
        "    if 'torch' in sys.modules:\n        sys.exit(f'torch was imported by {arguments}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_the_names_of_tasks_are_known_without_torch() -> None:
    from steadystep.cli import TASK_NAMES
    from steadystep.lab.tasks import TASKS

    assert set(TASK_NAMES) == set(TASKS)


def test_the_shell_can_complete_it() -> None:
    done = steadystep(_STEADYSTEP_COMPLETE="complete_bash", COMP_WORDS="steadystep diag", COMP_CWORD="1")
    assert done.stdout.split() == ["diagnose"]


@pytest.mark.parametrize("arguments", [("dmeo",), ("demo", "--steps", "0"), ("demo", "--steps", "many"), ("demo", "x")])
def test_a_users_mistake_is_a_message_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = steadystep(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Usage" in done.stderr


@pytest.mark.slow
def test_demo_tells_the_story_without_control_codes_in_a_pipe(tmp_path: Path) -> None:
    done = steadystep("demo", "--steps", "210", "--run-dir", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    said = " ".join(done.stdout.split())
    assert "step 150 all gradients are multiplied by 10 step 168 a schedule error" in said
    assert "step 192 one weight is overwritten with 3e38" in said
    assert "step 60 bit 20 of element 1000 of head.weight flipped between two updates, and was put back" in said
    assert "bit put back and the gradients computed again: nothing lost" in said
    assert "the last accepted learning rate, 0.003" in said
    assert "cause damaged-weights" in said
    assert "rolled back to step" in said
    assert done.stderr == ""
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("│")}
    assert "NaN" in rows["unguarded"]
    assert "lost" in rows["unguarded"]
    assert "finite" in rows["guarded"]
    for name in ("report.html", "compare.html"):
        assert str(tmp_path / "demo" / name) in said
        assert "</html>" in (tmp_path / "demo" / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_demo_and_dashboard_for_a_program(tmp_path: Path) -> None:
    done = steadystep("demo", "--steps", "70", "--run-dir", str(tmp_path / "demo"), "--json")
    told = json.loads(done.stdout)
    assert told["steps"] == 70
    assert told["runs"].keys() == {"no fault", "unguarded", "guarded"}
    assert told["runs"]["guarded"]["finite"] is True
    command = [sys.executable, "-m", "steadystep", "dashboard", str(tmp_path), "--port", "0", "--token", "t", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        where = json.loads(server.stdout.readline())
        server.send_signal(signal.SIGINT)
    assert where["address"].startswith("http://127.0.0.1:")
    assert where["token"] == "t"


@pytest.mark.slow
def test_find_lr_on_a_built_in_task() -> None:
    done = steadystep("find-lr", "clusters", "--steps", "40", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert 1e-4 < told["suggested"] < 10.0
    shown = steadystep("find-lr", "clusters", "--steps", "40").stdout
    assert "suggested:" in shown
    assert f"<- suggested {told['suggested']:.2e}" in shown
    assert "verdict:" in shown


OWN_JOB = """
import torch
from torch import nn
from types import SimpleNamespace

def make(seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    batches = torch.randn(8, 16, 4).unbind()  # fewer than the sweep needs
    return SimpleNamespace(
        model=model, batches=batches, loss=lambda x: model(x).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )

def empty(seed):
    job = make(seed)
    job.batches = []
    return job
"""


def test_find_lr_on_a_job_of_ones_own(tmp_path: Path) -> None:
    """A factory, and the file of a run, whose seed counts unless another is given."""
    (tmp_path / "own.py").write_text(OWN_JOB)
    (tmp_path / "run.yaml").write_text("task: own:make\nseed: 3\ntraining:\n  total_steps: 50\n")
    by_file, by_name = (
        steadystep("find-lr", *words, "--steps", "30", "--json", cwd=tmp_path)
        for words in (["run.yaml"], ["own:make", "--seed", "3"])
    )
    assert by_file.returncode == 0, by_file.stderr
    assert json.loads(by_file.stdout) == json.loads(by_name.stdout)
    refused = steadystep("find-lr", "own:empty", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "error: task 'own:empty': its batches are empty\n")


def test_find_lr_names_the_nearest_task() -> None:
    done = steadystep("find-lr", "cluster")
    assert done.returncode == 2
    assert "clusters" in done.stderr
    assert "Traceback" not in done.stderr


REFUSED = """
import contextlib, io, sys
from steadystep.cli.app import main

for words in ("train", "train nope.yaml", "replay nope --factory a:b", "find-lr nope", "examine nope:x", "bench nope",
              "diagnose nope", "report nope", "compare nope no", "compare one", "dashboard nope"):
    sys.argv, said = ["steadystep", *words.split()], io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as ended:
            assert ended.code == 2, words
    assert said.getvalue().startswith("error: ") and said.getvalue().count("\\n") == 1, said.getvalue()
    heavy = {"torch", "scipy", "starlette"} & set(sys.modules)
    assert not heavy, (words, heavy)
"""


def test_a_wrong_word_is_refused_in_one_line_before_anything_heavy_is_imported() -> None:
    subprocess.run([sys.executable, "-c", REFUSED], check=True)
