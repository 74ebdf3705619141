"""Definitions that lead back to themselves, and files that are nested too deeply: an answer, never a traceback."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from steadystep.cli.app import app
from steadystep.errors import ConfigError
from steadystep.lint import check_path, check_script
from steadystep.lint.check import Script

HEAD = """import torch
import torch.nn as nn
import torch.nn.functional as F
from functools import partial
from contextlib import contextmanager
from data import loader, val_loader, wrap
"""
LOOP = """
    for x, y in loader:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        for x, y in val_loader:
            print(model(x).argmax(1).tolist())
"""
ENDLESS = {
    "a name": "def main(f):\n    model = f()\n    model = f(model)\n    opt = opt = f(opt)" + LOOP,
    "each other": "def main(f):\n    model, other = other, model\n    opt = lr\n    lr = opt" + LOOP,
    "an attribute": """
class Trainer:
    def __init__(self, model, opt, **kw):
        self.model = wrap(self.model)
        self.opt = partial(self.opt, **kw)
        self.opt = self.opt()
        self.dtype = self.dtype if kw else partial(self.dtype)
    def fit(self):
        for x, y in loader:
            self.opt.zero_grad()
            with torch.autocast("cuda", dtype=self.dtype):
                loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.opt.step()
""",
    "partial of partial": """
make = partial(make, lr=0.1)
one = partial(two)
two = partial(one)
def main(model):
    opt = make(model.parameters())
    sched = one(opt)"""
    + LOOP,
    "a list of itself": """
def main(model, o):
    opts = [*opts, o]
    opts = opts + opts
    params = [*params, *params]
    opt = torch.optim.SGD(params, lr=lr, **opts[0])
    for opt in opts:
        opt.step()"""
    + LOOP,
    "a table of itself": """
cfg = {**cfg, "lr": cfg["lr"], "opt": cfg["opt"]}
cfg = cfg | cfg
def main(model):
    opt = cfg["opt"](model.parameters(), lr=cfg["lr"], **cfg)"""
    + LOOP,
    "bases in a ring": """
class A(A):
    rate = A.rate
    def forward(self, x):
        return self.forward(self(x))
class B(C):
    def step(self):
        return super().step()
class C(B):
    def step(self):
        return self.step()
def main():
    model, opt = A(), B(A().parameters())"""
    + LOOP,
    "functions that call each other": """
class Trainer:
    def train(self, batch):
        self.opt.zero_grad()
        self.first(batch).backward()
        self.opt.step()
    def first(self, x):
        return self.second(x)
    def second(self, x):
        return self.first(x) + self.model(x) + self.second(x)
    def evaluate(self):
        with torch.no_grad():
            for x in val_loader:
                print(self.first(x).item())
def main(t):
    t.train(0)
    t.evaluate()
""",
    "makers that call each other": """
def build(n):
    return make(n) if n else build(n - 1)
def make(n):
    return build(n)
def rate(n):
    return rate(n) * 2
def main(n):
    model = build(n)
    opt = torch.optim.SGD(build(n).parameters(), lr=rate(n))"""
    + LOOP,
    "lambdas": """
f = lambda: f()
g = lambda m: h(m)
h = lambda m: g(m)
def main():
    model = f()
    opt = g(model)"""
    + LOOP,
    "a manager in itself": """
@contextmanager
def quiet():
    with quiet():
        yield
def main(model, opt):
    with quiet():
        main(model, opt)"""
    + LOOP.replace("torch.no_grad()", "quiet()"),
    "parameters from themselves": """
def fit(model, opt, lr=lr):
    fit(model=model, opt=opt, lr=lr)
    loss = loss + loss
    x = x"""
    + LOOP,
    "a network of itself": """
class Net(nn.Module):
    def __init__(self, inner=None):
        self.inner = Net(self.inner)
        self.head = self.head
    def forward(self, x):
        return F.softmax(self.inner(self.head(x)), dim=1)
def main():
    model = Net(Net())
    model.inner = model
    opt = torch.optim.SGD(model.parameters(), lr=0.1)"""
    + LOOP,
    "a bracket inside of a key": "def main(model, t):\n    opt = t['a[1']\n    lr = t['b[\"']" + LOOP,
}


@pytest.mark.parametrize("title", ENDLESS)
def test_what_leads_back_to_itself_has_an_end(title: str) -> None:
    assert check_script(HEAD + ENDLESS[title]).kind == "script"


def test_a_partial_of_itself_is_read_to_its_end() -> None:
    text = """
class Back:
    def __init__(self, model, **kw):
        self.model = model
        self.back = partial(self.back, **kw)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
    def back(self, loss):
        loss.backward()
    def fit(self):
        for x, y in loader:
            F.cross_entropy(self.model(x), y).backward()
            self.opt.step()
"""
    assert [hit.code for hit in check_script(HEAD + text).faults] == ["SS106"]


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "-" * 3000 + "1",
        "x = " + "+".join(["1"] * 20000),
        "x" + ".a" * 5000 + "()",
        "if a:\n    f()\n" + "elif b:\n    f()\n" * 900,
    ],
    ids=["signs", "a sum", "attributes", "a chain of elif"],
)
def test_what_is_nested_too_deeply_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"deep\.py: cannot be parsed: nested too deeply"):
        list(check_path(path))


def test_a_folder_is_checked_around_such_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep.py").write_text("x = 1  # deep\n", encoding="utf-8")
    (tmp_path / "flat.py").write_text("x = 1\n", encoding="utf-8")
    begin = Script.__init__

    def endless(self: Script, text: str, path: str = "script.py", *_: object) -> None:
        if "deep" in text:
            raise RecursionError("maximum recursion depth exceeded")
        begin(self, text, path)

    monkeypatch.setattr(Script, "__init__", endless)
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 2
    assert "deep.py: cannot be parsed: nested too deeply" in result.output
    assert "no faults" in result.output
    assert "Traceback" not in result.output
