"""Recall of `steadystep check`: one fault at a time is injected into working training code, and the hits are compared.

Every Python file below the folders that steps an optimizer is a candidate; files of test suites are left out. For each
kind of fault the first place in the file where it can be made is changed. The file is checked before and after, with
the imports of its project followed; the fault is found when a new hit has one of the expected codes. Files are parsed,
never run, and nothing is written. The functions here decide which changes are made, without asking the rules: a change
that does no harm in its place counts as missed. Run:

    python benchmarks/check_injection.py FOLDER...              # a table: found of injected, by kind
    python benchmarks/check_injection.py FOLDER... --missed     # and every place that was missed
    python benchmarks/check_injection.py FOLDER... --json       # for a program
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from steadystep.errors import ConfigError
from steadystep.lint import check_script
from steadystep.lint.project import project_of

Lines = list[str]
TESTS = re.compile(r"(^|/)(tests?|testing|test_[^/]*\.py|[^/]*_test\.py|conftest\.py)(/|$)")


class Source:
    """A file that faults are made in."""

    def __init__(self, text: str) -> None:
        self.text, self.lines = text, text.splitlines()
        self.tree = ast.parse(text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.calls = [n for n in ast.walk(self.tree) if isinstance(n, ast.Call)]
        self.calls.sort(key=lambda c: (c.lineno, c.col_offset))

    def of(self, *names: str) -> list[ast.Call]:
        """Calls by the last part of what is called."""
        return [c for c in self.calls if _leaf(c) in names]

    def statements(self, *names: str) -> list[ast.Expr | ast.Assign]:
        """Calls that are a whole statement on lines of their own, with their block."""
        found: list[ast.Expr | ast.Assign] = []
        for stmt in (self.parents[call] for call in self.of(*names)):
            line = self.lines[stmt.lineno - 1].strip() if isinstance(stmt, ast.Expr | ast.Assign) else ";"
            if ";" not in line and isinstance(stmt, ast.Expr | ast.Assign) and line.startswith(ast.unparse(stmt)[:3]):
                found.append(stmt)
        return found

    def block(self, stmt: ast.stmt) -> list[ast.stmt]:
        """The statements it stands among."""
        parent = self.parents[stmt]
        bodies = [getattr(parent, name, []) for name in ("body", "orelse", "finalbody")]
        return next(b for b in bodies if stmt in b)

    def in_loop(self, node: ast.AST) -> bool:
        """Whether a loop of the same function is around it."""
        while node in self.parents and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node = self.parents[node]
            if isinstance(node, ast.For | ast.While):
                return True
        return False

    def goes_back_around(self, node: ast.AST) -> bool:
        """Whether the function around it, or the file outside of functions, goes back."""
        while node in self.parents and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node = self.parents[node]
        return any(isinstance(n, ast.Attribute) and n.attr == "backward" for n in ast.walk(node))

    def is_reset(self, total: ast.AugAssign) -> bool:
        """Whether a total begins anew in the innermost loop around it, or around the update it is for."""
        node: ast.AST = total
        while node in self.parents and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node = self.parents[node]
            if isinstance(node, ast.For | ast.While):
                anew = [n for n in ast.walk(node) if isinstance(n, ast.Assign)]
                if any(ast.unparse(total.target) in {ast.unparse(t) for t in n.targets} for n in anew):
                    return True
                if any(isinstance(n, ast.Attribute) and n.attr == "step" for n in ast.walk(node)):
                    return False
        return False

    def without(self, *stmts: ast.stmt) -> str:
        """The text with `pass` in place of statements."""
        lines = list(self.lines)
        for stmt in sorted(stmts, key=lambda s: -s.lineno):
            indent = re.match(r"\s*", lines[stmt.lineno - 1])
            lines[stmt.lineno - 1 : stmt.end_lineno] = [(indent[0] if indent else "") + "pass"]
        return "\n".join(lines) + "\n"

    def moved(self, stmt: ast.stmt, to: ast.stmt, *, after: bool) -> str:
        """The text with a statement next to another one of the same block."""
        own = self.lines[stmt.lineno - 1 : stmt.end_lineno]
        place = (to.end_lineno or to.lineno) if after else to.lineno - 1
        lines: list[str] = []
        for number, line in enumerate([*self.lines, ""]):
            if number == place:
                lines += own
            if not stmt.lineno - 1 <= number < (stmt.end_lineno or stmt.lineno):
                lines.append(line)
        return "\n".join(lines)

    def replaced(self, node: ast.AST, text: str) -> str:
        """The text with another expression in place of one."""
        first, end = int(getattr(node, "lineno", 1)) - 1, int(getattr(node, "end_lineno", 1)) - 1
        begin, stop = int(getattr(node, "col_offset", 0)), int(getattr(node, "end_col_offset", 0))
        head = self.lines[first].encode()[:begin].decode()
        tail = self.lines[end].encode()[stop:].decode()
        return "\n".join([*self.lines[:first], head + text + tail, *self.lines[end + 1 :]]) + "\n"


def _leaf(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _owner(call: ast.AST) -> str:
    return ast.unparse(call.func.value) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def _call(stmt: ast.stmt) -> ast.Call:
    value = getattr(stmt, "value", None)
    assert isinstance(value, ast.Call)
    return value


def _optimizer_steps(source: Source) -> list[ast.stmt]:
    steps = source.statements("step")
    return [s for s in steps if re.search(r"opt|scaler", _owner(_call(s)), re.I) and "sched" not in _owner(_call(s))]


def _beside(source: Source, stmt: ast.stmt, others: list[ast.stmt]) -> ast.stmt | None:
    return next((o for o in others if o in source.block(stmt)), None)


def no_zero_grad(source: Source) -> Iterator[str]:
    """Every zero_grad of a file with one optimizer is gone."""
    zeros = [s for s in source.statements("zero_grad") if source.in_loop(s)]
    if len({_owner(_call(s)) for s in zeros}) == 1 and len(zeros) == len(source.of("zero_grad")):
        yield source.without(*zeros)


def no_backward(source: Source) -> Iterator[str]:
    backwards = [s for s in source.statements("backward") if source.in_loop(s)]
    if len(source.of("backward")) == len(backwards) == 1 and source.of("zero_grad"):
        yield source.without(backwards[0])


def zero_before_step(source: Source) -> Iterator[str]:
    steps = _optimizer_steps(source)
    for zero in source.statements("zero_grad"):
        back = _beside(source, zero, list(source.statements("backward")))
        step = next((s for s in steps if s in source.block(zero) and _owner(_call(zero)) in ast.unparse(s)), None)
        if back is not None and step is not None and zero.lineno < back.lineno < step.lineno:
            yield source.moved(zero, step, after=False)


def _clips(source: Source) -> list[ast.Expr | ast.Assign]:
    return source.statements("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")


def clip_after_step(source: Source) -> Iterator[str]:
    for clip in _clips(source):
        step = _beside(source, clip, [s for s in _optimizer_steps(source) if s.lineno > clip.lineno])
        if step is not None:
            yield source.moved(clip, step, after=True)


def clip_before_backward(source: Source) -> Iterator[str]:
    for clip in _clips(source):
        back = _beside(source, clip, [s for s in source.statements("backward") if s.lineno < clip.lineno])
        if back is not None and _beside(source, clip, _optimizer_steps(source)) is not None:
            yield source.moved(clip, back, after=False)


def no_unscale(source: Source) -> Iterator[str]:
    for stmt in source.statements("unscale_"):
        if _beside(source, stmt, list(_clips(source))) is not None and len(source.of("unscale_")) == 1:
            yield source.without(stmt)


def no_scaler_update(source: Source) -> Iterator[str]:
    updates = [s for s in source.statements("update") if "scaler" in _owner(_call(s))]
    if updates and any("scaler" in _owner(s) for s in source.of("step")):
        yield source.without(*updates)


def step_past_scaler(source: Source) -> Iterator[str]:
    for call in source.of("step"):
        if "scaler" in _owner(call) and call.args and not source.of("unscale_"):
            yield source.replaced(call, f"{ast.unparse(call.args[0])}.step()")


def schedule_first(source: Source) -> Iterator[str]:
    for stmt in [s for s in source.statements("step") if "sched" in _owner(_call(s)).lower() and not _call(s).args]:
        step = _beside(source, stmt, [s for s in _optimizer_steps(source) if s.lineno < stmt.lineno])
        if step is not None and source.in_loop(stmt):
            yield source.moved(stmt, step, after=False)


def loss_item(source: Source) -> Iterator[str]:
    """`loss.backward()` of a loss that was detached a line before."""
    for stmt in source.statements("backward"):
        owner = _owner(_call(stmt))
        if owner.isidentifier() and not _call(stmt).args and "loss" in owner:
            indent = " " * stmt.col_offset
            line = source.lines[stmt.lineno - 1]
            yield "\n".join(
                [
                    *source.lines[: stmt.lineno - 1],
                    f"{indent}{owner} = {owner}.detach().requires_grad_()",
                    line,
                    *source.lines[stmt.lineno :],
                    "",
                ]
            )


def total_keeps_graph(source: Source) -> Iterator[str]:
    """`total += loss.item()` without the `.item()`, where the same loss is trained on in the same loop."""
    trained = {_owner(c) for c in source.of("backward")} | {
        ast.unparse(a) for c in source.of("backward") for a in c.args
    }
    for node in ast.walk(source.tree):
        added = isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Call) and _leaf(node.value) == "item"
        if not added or not isinstance(node, ast.AugAssign) or not isinstance(node.value, ast.Call):
            continue
        if not source.goes_back_around(node):
            continue  # in an evaluation there is no graph to keep
        if _owner(node.value) in trained and source.in_loop(node) and not source.is_reset(node):
            yield source.replaced(node.value, _owner(node.value))


def _losses(source: Source, function: str, criterion: str) -> Iterator[ast.Call]:
    """Calls of a loss of torch: by its function, or by what a class of torch was assigned to."""
    made = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and re.search(rf"(?<![A-Za-z]){criterion}\(", ast.unparse(node.value)):
            made |= {ast.unparse(target) for target in node.targets}
    for call in source.calls:
        plain = len(call.args) >= 2 and not isinstance(call.args[0], ast.Starred)
        if plain and (_leaf(call) == function or ast.unparse(call.func) in made):
            yield call


def softmax_first(source: Source) -> Iterator[str]:
    for call in _losses(source, "cross_entropy", "CrossEntropyLoss"):
        yield source.replaced(call.args[0], f"({ast.unparse(call.args[0])}).softmax(dim=1)")


def sigmoid_first(source: Source) -> Iterator[str]:
    for call in _losses(source, "binary_cross_entropy_with_logits", "BCEWithLogitsLoss"):
        yield source.replaced(call.args[0], f"({ast.unparse(call.args[0])}).sigmoid()")


def probabilities_to_nll(source: Source) -> Iterator[str]:
    if any(_losses(source, "nll_loss", "NLLLoss")):
        for call in source.of("log_softmax"):
            yield source.replaced(call.func, ast.unparse(call.func).replace("log_softmax", "softmax"))


def no_eval(source: Source) -> Iterator[str]:
    """The only eval() of a file with dropout or batch norm in it, on a network that it also trains."""
    evals = [s for s in source.statements("eval") if not _call(s).args]
    random = re.search(r"nn\.(Dropout|BatchNorm)", source.text)
    trained = {_owner(c) for c in source.of("train", "parameters")}
    alone = len(evals) == len([c for c in source.of("eval") if not c.args]) == 1
    if alone and random and source.of("backward") and _owner(_call(evals[0])) in trained:
        yield source.without(evals[0])


def no_train(source: Source) -> Iterator[str]:
    """Every train() of a file with dropout or batch norm in it that evaluates in the loop that trains."""
    trains = [s for s in source.statements("train") if not _call(s).args and _owner(_call(s))]
    evals = [s for s in source.statements("eval") if not _call(s).args]
    same = {_owner(_call(s)) for s in trains} == {_owner(_call(s)) for s in evals} and len(trains) == len(
        source.of("train")
    )
    random = re.search(r"nn\.(Dropout|BatchNorm)", source.text)
    if random and trains and same and all(source.in_loop(s) for s in evals) and any(source.in_loop(s) for s in trains):
        yield source.without(*trains)


def no_no_grad(source: Source) -> Iterator[str]:
    """The only `with torch.no_grad():`, around a loop over held-out data."""
    found = [
        n
        for n in ast.walk(source.tree)
        if isinstance(n, ast.With) and ast.unparse(n.items[0].context_expr).endswith("no_grad()")
    ]
    if len(found) == source.text.count("no_grad") == 1 and len(found[0].items) == 1 and source.of("backward"):
        loops = [n for n in found[0].body if isinstance(n, ast.For) and re.search("val|test", ast.unparse(n.iter))]
        if loops and source.of("eval"):
            line = source.lines[found[0].lineno - 1]
            yield source.text.replace(line, re.sub(r"with .*:", "if True:", line), 1)


def huge_rate(source: Source) -> Iterator[str]:
    for call in source.of("Adam", "AdamW", "SGD", "RMSprop"):
        for keyword in call.keywords:
            if keyword.arg == "lr" and isinstance(keyword.value, ast.Constant):
                yield source.replaced(keyword.value, "500.0")


def tiny_clip(source: Source) -> Iterator[str]:
    for clip in _clips(source):
        if len(_call(clip).args) > 1 and isinstance(_call(clip).args[1], ast.Constant):
            yield source.replaced(_call(clip).args[1], "1e-9")


def accumulation_not_divided(source: Source) -> Iterator[str]:
    """`loss = loss / accumulation_steps` and `loss /= accumulation_steps` gone, or without the division."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Assign | ast.AugAssign) or not source.in_loop(node):
            continue
        value = node.value
        if isinstance(node, ast.AugAssign):
            if isinstance(node.op, ast.Div) and "accum" in ast.unparse(value) and "loss" in ast.unparse(node.target):
                yield source.without(node)
        elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) and "accum" in ast.unparse(value.right):
            same = ast.unparse(node.targets[0]) == ast.unparse(value.left)
            if "loss" in ast.unparse(node.targets[0]):
                yield source.without(node) if same else source.replaced(value, ast.unparse(value.left))


def retain_graph(source: Source) -> Iterator[str]:
    backwards = source.of("backward")
    if len(backwards) == 1 and not backwards[0].args and not backwards[0].keywords and source.in_loop(backwards[0]):
        yield source.replaced(backwards[0], f"{ast.unparse(backwards[0].func)}(retain_graph=True)")


def other_network(source: Source) -> Iterator[str]:
    """Of two optimizers, each with its own network, the second is given the first one's."""
    made = [
        c
        for c in source.of("Adam", "AdamW", "SGD", "RMSprop")
        if c.args and re.fullmatch(r"[\w.]+\.parameters\(\)", ast.unparse(c.args[0]))
    ]
    if len(made) == 2 and ast.unparse(made[0].args[0]) != ast.unparse(made[1].args[0]):
        yield source.replaced(made[1].args[0], ast.unparse(made[0].args[0]))


def no_set_epoch(source: Source) -> Iterator[str]:
    found = source.statements("set_epoch")
    if found and source.of("DistributedSampler") and source.of("backward"):
        yield source.without(*found)


def no_optimizer_state(source: Source) -> Iterator[str]:
    """The optimizer left out of a checkpoint with a position, and of the resume."""
    text = re.sub(r"^(\s*)\S*opt\w*\.load_state_dict\(.*\n", r"\1pass\n", source.text, flags=re.M)
    text = re.sub(r"^.*opt\w*\.state_dict\(.*\n", "", text, flags=re.M)
    position = r"\[['\"](epoch|step|iter|global_step)s?['\"]\]"
    resumes = re.search(position, text) and re.search(r"['\"](epoch|step|iter)s?['\"]\s*:", text) and source.of("load")
    if text != source.text and resumes and source.of("backward") and not re.search(r"opt\w*\.state_dict", text):
        yield text


def grad_typo(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "requires_grad" and isinstance(node.ctx, ast.Store):
            yield source.replaced(node, ast.unparse(node.value) + ".require_grad")


def through_numpy(source: Source) -> Iterator[str]:
    for call in [*_losses(source, "cross_entropy", "CrossEntropyLoss"), *_losses(source, "mse_loss", "MSELoss")]:
        if isinstance(call.args[0], ast.Name) and source.goes_back_around(call):
            name = call.args[0].id
            yield source.replaced(call.args[0], f"torch.tensor({name}.detach().cpu().numpy(), requires_grad=True)")


def no_log_eps(source: Source) -> Iterator[str]:
    for call in source.of("log_softmax"):
        dim = ", ".join([*map(ast.unparse, call.args[1:]), *(f"{k.arg}={ast.unparse(k.value)}" for k in call.keywords)])
        if ast.unparse(call.func) in ("F.log_softmax", "torch.log_softmax") and call.args and not _losses_exist(source):
            yield source.replaced(call, f"torch.log(torch.softmax({ast.unparse(call.args[0])}, {dim or 'dim=-1'}))")


def _losses_exist(source: Source) -> bool:
    return any(_losses(source, "cross_entropy", "CrossEntropyLoss"))


KINDS: dict[str, tuple[Callable[[Source], Iterator[str]], tuple[str, ...]]] = {
    "zero_grad removed": (no_zero_grad, ("SS106",)),
    "backward removed": (no_backward, ("SS108",)),
    "zero_grad between backward and step": (zero_before_step, ("SS107",)),
    "clip after step": (clip_after_step, ("SS102",)),
    "clip before backward": (clip_before_backward, ("SS103",)),
    "unscaling removed": (no_unscale, ("SS101",)),
    "scaler update removed": (no_scaler_update, ("SS203",)),
    "step past the scaler": (step_past_scaler, ("SS204",)),
    "schedule before step": (schedule_first, ("SS104",)),
    "loss detached": (loss_item, ("SS301",)),
    "total keeps graphs": (total_keeps_graph, ("SS302",)),
    "softmax before cross-entropy": (softmax_first, ("SS303",)),
    "sigmoid before BCE with logits": (sigmoid_first, ("SS304",)),
    "NLL of probabilities": (probabilities_to_nll, ("SS305",)),
    "eval() removed": (no_eval, ("SS401",)),
    "train() removed": (no_train, ("SS403",)),
    "no_grad removed": (no_no_grad, ("SS402",)),
    "learning rate of 500": (huge_rate, ("SS502",)),
    "clip limit of 1e-9": (tiny_clip, ("SS503",)),
    "accumulation not divided": (accumulation_not_divided, ("SS109",)),
    "graph retained": (retain_graph, ("SS110",)),
    "other network optimized": (other_network, ("SS604", "SS603", "SS106")),
    "set_epoch removed": (no_set_epoch, ("SS701",)),
    "optimizer left out of checkpoint": (no_optimizer_state, ("SS704",)),
    "requires_grad misspelled": (grad_typo, ("SS606",)),
    "prediction through numpy": (through_numpy, ("SS308", "SS301")),
    "log of softmax": (no_log_eps, ("SS307",)),
}


def codes(text: str, path: Path, project: Path) -> Counter[str]:
    """How many hits of each rule, or none when it cannot be parsed."""
    return Counter(hit.code for hit in check_script(text, str(path), project=project).faults)


def study(folders: list[Path]) -> Iterator[tuple[str, Path, bool, list[str]]]:
    """(kind, file, found, other new codes) for every injected fault."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if TESTS.search(str(path.relative_to(folder))):
                continue
            try:
                text = path.read_text(encoding="utf-8-sig")
                source = Source(text)
            except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, OSError):
                continue
            if source.of("step") and source.of("backward", "zero_grad"):
                yield from _in_file(source, path, project_of(folder))


def _in_file(source: Source, path: Path, project: Path) -> Iterator[tuple[str, Path, bool, list[str]]]:
    before = codes(source.text, path, project)
    for kind, (make, expected) in KINDS.items():
        for text in make(source):
            try:
                new = codes(text, path, project) - before
            except ConfigError:
                continue
            yield kind, path, any(code in new for code in expected), sorted(set(new) - set(expected))
            break


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--missed", action="store_true", help="list what was missed, and new hits of other rules")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = list(study(args.folders))
    kinds = [k for k in KINDS if any(r[0] == k for r in rows)]
    table = {k: (sum(r[2] for r in rows if r[0] == k), sum(r[0] == k for r in rows)) for k in kinds}
    found, other = sum(r[2] for r in rows), sum(bool(r[3]) for r in rows)
    if args.json:
        print(json.dumps({"found": found, "injected": len(rows), "other": other, "kinds": table}))
        return 0
    for kind, (seen, made) in table.items():
        print(f"{kind:40} {seen:4} of {made}")
    files = len({r[1] for r in rows})
    print(f"{'all':40} {found:4} of {len(rows)} in {files} files; {other} with hits of other rules too")
    for kind, path, seen, others in rows if args.missed else ():
        if not seen or others:
            print(f"{'missed' if not seen else 'other '} {kind}: {path} {' '.join(others)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
