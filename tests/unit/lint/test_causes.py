"""What scripts of another author taught the rules: each cause of a miss, and next to it what must stay silent."""

import pytest

from steadystep.lint import check_script

HEAD = """import torch
import torch.nn as nn
import torch.nn.functional as F
from data import loader
"""

TWO = """gen, disc = nn.Linear(2, 2), nn.Linear(2, 1)
g_opt = torch.optim.Adam(gen.parameters(), lr=1e-4)
d_opt = torch.optim.Adam(disc.parameters(), lr=1e-4)
for x in loader:
    {zero}
    d_loss = disc(x).mean()
    d_loss.backward()
    d_opt.step()
    g_loss = -disc(gen(x)).mean()
    g_loss.backward()
    g_opt.step()
"""


@pytest.mark.parametrize(
    ("zero", "hits"),
    [
        ("d_opt.zero_grad()", ["SS106"]),
        ("disc.zero_grad()", ["SS106"]),
        ("d_opt.zero_grad(); g_opt.zero_grad()", []),
        ("disc.zero_grad(); gen.zero_grad()", []),
        ("whole.zero_grad()", []),
        ("d_opt.zero_grad(); reset_grads()", []),
        ("for o in (d_opt, g_opt): o.zero_grad()", []),
        ("for p in params: p.grad = None", []),
    ],
)
def test_each_optimizer_is_cleared_for_itself(zero: str, hits: list[str]) -> None:
    assert _codes(TWO.format(zero=zero)) == hits


def test_a_network_made_from_the_other_is_cleared_with_it() -> None:
    text = TWO.format(zero="d_opt.zero_grad()").replace("gen, disc = nn.Linear(2, 2), nn.Linear(2, 1)", "{made}")
    assert _codes(text.format(made="gen = nn.Linear(2, 2); disc = nn.Sequential(gen, nn.Linear(2, 1))")) == []
    assert _codes(text.format(made="gen = disc = nn.Linear(2, 2)")) == []
    assert _codes(text.format(made="gen = nn.Linear(2, 2); disc = nn.Linear(2, 1)")) == ["SS106"]
    assert _codes(text.format(made="gen, disc = networks()")) == ["SS106"]


HALF = """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
{before}
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out, scale = model(x)
        loss = F.mse_loss(out * scale, y)
    {backward}
    optimizer.step()
    writer.add_scalar("loss", loss.item())
"""


@pytest.mark.parametrize(
    ("before", "backward", "hits"),
    [
        ("", "loss.backward()", ["SS202"]),
        ("rescale = 2", "loss.backward()", ["SS202"]),
        ("scaler = StandardScaler()", "loss.backward()", ["SS202"]),
        ("from timm.utils import NativeScaler", "loss.backward()", []),
        ("loss_scale = 1024", "(loss * loss_scale).backward()", []),
        ("s_scale = 1024", "(loss * s_scale).backward()", []),
        ("", "loss.backward(); [p.grad.div_(9) for p in params]", []),
    ],
)
def test_only_what_scales_a_loss_is_a_scaler(before: str, backward: str, hits: list[str]) -> None:
    assert _codes(HALF.format(before=before, backward=backward)) == hits


DISTIL = """teacher = nn.Linear(2, 2)
{setup}
student = nn.Linear(2, 2)
optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-4)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.mse_loss(student(x), y)
    loss.backward()
    {copy}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("setup", "copy", "hits"),
    [
        ("teacher.load_state_dict(torch.load('t.pt'))", "", ["SS604"]),
        ("teacher.requires_grad_(False).eval()", "teacher.zero_grad()", ["SS604", "SS107"]),
        ("teacher.load_state_dict(torch.load('t.pt'))", "student.load_state_dict(teacher.state_dict())", []),
        ("", "for p, q in zip(teacher.parameters(), student.parameters()): p.grad = q.grad", []),
        ("wrapped = wrap(teacher)", "", []),
    ],
)
def test_setting_a_network_up_is_not_using_it(setup: str, copy: str, hits: list[str]) -> None:
    assert _codes(DISTIL.format(setup=setup, copy=copy)) == hits


CLASS = """class Session:
    def __init__(self):
        self.model = nn.Linear(2, 2)
        self.state = torch.zeros(2)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def update(self, x):
        self.optim.zero_grad()
        loss = F.mse_loss({output}, x)
        loss.backward(retain_graph=True)
        self.optim.step()
        {end}

    def run(self):
        for epoch in range(9):
            for x, _ in loader:
                {call}
"""


@pytest.mark.parametrize(
    ("output", "end", "call", "hits"),
    [
        ("self.model(x)", "return loss.item()", "self.update(x.cuda())", ["SS110"]),
        ("self.model(x)", "return loss", "self.update(x)", []),
        ("self.model(x)", "self.last = loss", "self.update(x)", []),
        ("self.model(x)", "return loss.item()", "self.update(shared(x))", []),
        ("self.model(x) + self.state", "self.state = self.model(x)", "self.update(x)", []),
        ("self.model(x)", "return loss.item()", "self.update(x); self.update(x)", []),
    ],
)
def test_a_graph_kept_in_a_method(output: str, end: str, call: str, hits: list[str]) -> None:
    assert _codes(CLASS.format(output=output, end=end, call=call)) == hits


LOOP = """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
{before}
for x, y in loader:
    {first}
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward({keep})
    optimizer.step()
    {last}
{after}
"""


@pytest.mark.parametrize(
    ("first", "hits"),
    [
        ("x, y = x.cuda(), y.to('cuda')", ["SS110"]),
        ("y = model(x); y = y + 1", ["SS110"]),
        ("z = model(z); x = x + z", []),
    ],
)
def test_what_the_loop_gives_is_not_carried(first: str, hits: list[str]) -> None:
    assert _codes(LOOP.format(before="", first=first, keep="retain_graph=True", last="", after="")) == hits


@pytest.mark.parametrize(
    ("before", "last", "after", "hits"),
    [
        ("losses = []", "losses.append(loss)", "print(torch.stack(losses).mean())", ["SS302"]),
        ("losses = []", "losses.append(loss.detach())", "", []),
        ("losses = []", "loss = loss.item()\n    losses.append(loss)", "", []),
        ("losses = []", "losses.append(loss)\n    if x: losses = []", "", []),
        ("losses = []", "losses.append(loss)\n    losses.clear()", "", []),
        ("losses = deque(maxlen=9)", "losses.append(loss)", "", []),
        ("losses = []", "losses.append(loss)", "for part in losses:\n    part.backward()", []),
        ("losses = []", "losses.append(loss)", "total = sum(losses)\ntotal.backward()", []),
    ],
)
def test_a_list_of_losses(before: str, last: str, after: str, hits: list[str]) -> None:
    assert _codes(LOOP.format(before=before, first="", keep="", last=last, after=after)) == hits


def test_what_an_outer_loop_gives_is_carried_through_the_inner_one() -> None:
    text = LOOP.format(before="", first="x = x + model(x)", keep="retain_graph=True", last="", after="")
    assert _codes(text) == ["SS110"]
    assert _codes(text.replace("for x, y in loader:", "for x, y in loader:\n  for step in range(9):")) == []


def test_a_graph_may_be_kept_for_a_network_that_remembers_and_where_nothing_is_trained() -> None:
    text = LOOP.format(before="", first="", keep="retain_graph=True", last="", after="")
    assert _codes(text) == ["SS110"]
    assert _codes("class Net(nn.Module):\n    def forward(self, x):\n        self.last = x\n" + text) == []
    assert _codes(text.replace("optimizer.step()", "look(model)")) == []


def test_a_few_losses_may_be_listed() -> None:
    text = LOOP.format(before="losses = []", first="", keep="", last="losses.append(loss)", after="")
    assert _codes(text.replace("for x, y in loader", "for step in range(300)")) == ["SS302"]
    assert _codes(text.replace("for x, y in loader", "for step in range(3)")) == []
    assert _codes(text.replace("for x, y in loader", "for model, optimizer in pairs")) == []
    assert _codes(text.replace("    optimizer.step()\n", "") + "optimizer.step()\n") == []
    assert _codes(text.replace("backward()", "backward(retain_graph=keep)")) == []


def test_losses_of_a_joint_backward_may_be_collected() -> None:
    text = "optimizer = torch.optim.Adam(m.parameters(), lr=1e-3)\nfor x in loader:\n    optimizer.zero_grad()\n"
    text += "    losses = []\n    for part in x:\n        loss = m(part).mean()\n        losses.append(loss)\n"
    assert _codes(text + "    sum(losses).backward()\n    optimizer.step()\n") == []


SGD = """model = nn.Linear(2, 2)
{loss}
optimizer = torch.optim.SGD(model.parameters(), lr={rate}, momentum=0.9)
{after}
"""


@pytest.mark.parametrize(
    ("loss", "rate", "after", "hits"),
    [
        ("crit = nn.CrossEntropyLoss()", "1e-7", "", ["SS502"]),
        ("crit = nn.CrossEntropyLoss()", "1e-6", "", []),
        ("crit = nn.MSELoss(reduction='sum')", "1e-8", "", []),
        ("crit = nn.MSELoss(reduction='sum')", "1e-9", "", ["SS502"]),
        ("from mine import crit", "1e-7", "", []),
        ("crit = nn.MSELoss()", "1e-7", "loss = (model(x) - y).pow(2).sum()", []),
        ("crit = nn.MSELoss()", "1e-7", "sched = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 9)", []),
        ("crit = nn.MSELoss()", "1e-7", "for group in optimizer.param_groups:\n    group['lr'] = 0.1", []),
        ("crit = nn.CrossEntropyLoss()", "20", "", []),
        ("crit = nn.CrossEntropyLoss()", "50", "", ["SS502"]),
    ],
)
def test_the_rates_of_sgd(loss: str, rate: str, after: str, hits: list[str]) -> None:
    assert _codes(SGD.format(loss=loss, rate=rate, after=after)) == hits


NET = """class Net({base}):
    def forward(self, x):
        return {returned}

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy({called}, y)
{more}
"""


@pytest.mark.parametrize(
    ("base", "returned", "called", "more", "hits"),
    [
        ("pl.LightningModule", "F.softmax(self.fc(x), 1)", "self(x)", "", ["SS303"]),
        ("nn.Module", "F.softmax(self.fc(x), 1)", "self.forward(x)", "", ["SS303"]),
        ("nn.Module", "self.fc(x)", "self(x)", "", []),
        ("Callable", "F.softmax(self.fc(x), 1)", "self(x)", "", []),
        ("nn.Module", "x.softmax(1)", "self(x)", "    def __call__(self, x):\n        return x", []),
        ("nn.Module", "x.softmax(1)", "self(x)", "class Raw(Net):\n    def forward(self, x):\n        return x", []),
    ],
)
def test_a_network_that_calls_itself(base: str, returned: str, called: str, more: str, hits: list[str]) -> None:
    assert _codes(NET.format(base=base, returned=returned, called=called, more=more)) == hits


def _codes(text: str) -> list[str]:
    return [hit.code for hit in check_script(HEAD + text).faults]
