"""Several files of one project: imports are followed inside it, and only there; test folders are advice."""

from pathlib import Path

import pytest

from steadystep.lint import Report, check_path, check_script

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\nfrom data import loader, test_loader\n"
MODEL = "model = nn.Linear(2, 2)\nopt = torch.optim.Adam(model.parameters(), lr=1e-3)\n"
CLEARS = "def fresh(opt):\n    opt.zero_grad()\n"
LOOP = """for x, y in loader:
    FIRST
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
"""


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/').replace('INIT', '__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def reports(folder: Path) -> dict[str, Report]:
    return {str(Path(report.path).relative_to(folder)): report for report in check_path(folder)}


def codes(folder: Path) -> dict[str, list[str]]:
    return {path: [hit.code for hit in report.faults] for path, report in reports(folder).items() if report.faults}


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("from helpers import fresh", "fresh(opt)"),
        ("from helpers import fresh as wipe", "wipe(opt)"),
        ("import helpers", "helpers.fresh(opt)"),
        ("import helpers as h", "h.fresh(opt)"),
    ],
)
def test_what_an_imported_function_does_is_known(tmp_path: Path, line: str, call: str) -> None:
    """It clears the gradients in one project, and only prints in the other."""
    script = f"{HEAD}{line}\n{MODEL}{LOOP.replace('FIRST', call)}"
    clears = written(tmp_path / "a", train=script, helpers=CLEARS)
    prints = written(tmp_path / "b", train=script, helpers="def fresh(opt):\n    print(opt.param_groups[0]['lr'])\n")
    assert codes(clears) == {}
    assert codes(prints) == {"train.py": ["SS106"]}


def test_relative_imports_packages_and_names_passed_on(tmp_path: Path) -> None:
    script = f"{HEAD}from .steps import one_step\n{MODEL}for x, y in loader:\n    one_step(model, opt, x, y)\n"
    step = "def one_step(model, opt, x, y):\n    loss = F.mse_loss(model(x), y)\n    loss.backward()\n    opt.step()\n"
    project = written(
        tmp_path, pkg__INIT="", pkg__train=script, pkg__steps__INIT="from .core import one_step\n",
        pkg__steps__core=f"import torch.nn.functional as F\n{step}",
    )  # fmt: skip
    assert [hit.code for hit in check_script(script, "x.py").faults] == []
    project.joinpath("pkg/train.py").write_text(
        script + "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    )
    assert codes(project) == {"pkg/train.py": ["SS102"]}


def test_a_network_of_another_file_meets_its_loss(tmp_path: Path) -> None:
    """The hit is at the import, with the place in the other file, and without a diff."""
    net = (
        "import torch.nn as nn\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        "
    )
    net += "self.f = nn.Linear(2, 2)\n    def forward(self, x):\n        return self.f(x).softmax(-1)\n"
    script = HEAD + "from net import Net\n" + MODEL.replace("nn.Linear(2, 2)", "Net()")
    script += LOOP.replace("FIRST", "opt.zero_grad()").replace("mse_loss", "cross_entropy")
    found = reports(written(tmp_path, train=script, net=net))
    assert [(hit.code, hit.line, hit.diff) for hit in found["train.py"].faults] == [("SS303", 5, "")]
    assert "(net.py:8)" in found["train.py"].faults[0].message
    assert not found["net.py"].hits


def test_a_network_of_another_file_without_dropout_needs_no_eval(tmp_path: Path) -> None:
    layers = "import torch.nn as nn\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    layers += (
        "        self.f = nn.Sequential(nn.Linear(2, 2), LAST)\n    def forward(self, x):\n        return self.f(x)\n"
    )
    script = HEAD + "from net import Net\n" + MODEL.replace("nn.Linear(2, 2)", "Net()")
    script += "for epoch in range(3):\n    " + LOOP.replace("FIRST", "opt.zero_grad()").replace("\n", "\n    ").rstrip()
    script += "\n    with torch.no_grad():\n        for x, y in test_loader:\n"
    script += "            print(F.mse_loss(model(x), y).item())\n"
    plain = written(tmp_path / "a", train=script, net=layers.replace("LAST", "nn.ReLU()"))
    random = written(tmp_path / "b", train=script, net=layers.replace("LAST", "nn.Dropout(0.1)"))
    assert codes(plain) == {}
    assert codes(random) == {"train.py": ["SS401"]}


def test_a_fault_of_another_file_is_reported_once(tmp_path: Path) -> None:
    step = "def one_step(model, opt, x, y):\n    opt.zero_grad()\n    loss = F.mse_loss(model(x), y)\n"
    step += "    loss.backward()\n    opt.step()\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    script = f"{HEAD}from steps import one_step\n{MODEL}for x, y in loader:\n    one_step(model, opt, x, y)\n"
    project = written(tmp_path, train=script, steps=f"import torch\nimport torch.nn.functional as F\n{step}")
    assert codes(project) == {"steps.py": ["SS102"]}


def test_names_that_mean_something_else_there_are_kept_apart(tmp_path: Path) -> None:
    """Both files have a `wipe`; the one that `fresh` calls is its own."""
    helpers = "def fresh(opt):\n    wipe(opt)\n\ndef wipe(opt):\n    opt.zero_grad()\n"
    script = f"{HEAD}from helpers import fresh\ndef wipe(text):\n    print(text, text.grad)\n{MODEL}"
    assert codes(written(tmp_path, train=script + LOOP.replace("FIRST", "fresh(opt)"), helpers=helpers)) == {}


def test_nothing_outside_the_project_is_read(tmp_path: Path) -> None:
    written(tmp_path, helpers="def fresh(opt):\n    print(opt.step_count, opt.grad)\n")
    project = written(
        tmp_path / "inner", train=f"{HEAD}from helpers import fresh\n{MODEL}{LOOP.replace('FIRST', 'fresh(opt)')}"
    )
    (project / "pyproject.toml").touch()
    assert codes(project) == {}


def test_files_that_import_each_other_or_cannot_be_parsed(tmp_path: Path) -> None:
    script = f"{HEAD}from other import fresh\nfrom broken import thing\nthing()\n{MODEL}"
    script += LOOP.replace("FIRST", "fresh(opt)")
    written(
        tmp_path, train=script + "def back():\n    fresh(opt)\n", other=f"from train import back\n{CLEARS}    back()\n"
    )
    (tmp_path / "broken.py").write_text("def thing(:\n")
    with pytest.raises(Exception, match="not valid Python"):
        codes(tmp_path)
    assert not next(check_path(tmp_path / "train.py")).faults


def test_test_folders_are_advice(tmp_path: Path) -> None:
    fault = HEAD + MODEL + LOOP.replace("FIRST", "pass")
    suite = fault + "\ndef test_it():\n    pass\n"
    found = reports(written(tmp_path, train=fault, tests__odd=fault, src__test_step=suite, src__test_model=fault))
    counted = {path for path, report in found.items() if report.faults}
    assert counted == {"train.py", "src/test_model.py"}
    assert [hit.severity for hit in found["tests/odd.py"].hits] == ["advice"]
    assert next(check_path(tmp_path / "tests" / "odd.py")).faults
