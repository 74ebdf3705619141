"""The figure of docs/walk.md: the files that one healthy step calls, stage by stage, from a recorded step.

python tools/walk_figure.py    (writes docs/images/walk.svg; a few seconds)
"""

from pathlib import Path

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "walk.svg"
WIDTH, EDGE, COLUMNS = 760, 16, 3
ROW, HEAD, GAP = 19, 34, 40  # a row of files, the head of a box, the arrow between two boxes
ABOUT = {
    "collect": "closure, autocast, backward",
    "measure": "MEASURE: tensors become numbers, one host read",
    "judge": "NOTICE: the detectors. EXPLAIN and DECIDE wait for a finding",
    "apply": "ACT: clip, optimizer step, zero_grad",
    "record": "RECORD: budget, history, snapshots due, log",
}
HANDED_ON = {
    "collect": "losses and gradients, on the device",
    "measure": "GradientView with Signals",
    "judge": "Verdict: diagnosis and plan",
    "apply": "Outcome",
    "record": "Outcome, returned to the loop",
}
# why a background of its own: a picture does not follow the site's switch between light and dark
STYLE = """text { font: 12px ui-monospace, monospace; fill: #1e293b } .again { fill: #64748b }
.stage { font: bold 15px sans-serif; fill: #312e81 } .about { font: 12px sans-serif; fill: #475569 }
.handed { font: italic 12px sans-serif; fill: #475569 } .box { fill: #ffffff; stroke: #c7d2fe; stroke-width: 1.5 }
line { stroke: #6366f1; stroke-width: 1.5; marker-end: url(#tip) } #tip path { fill: #6366f1 }"""
TIP = (
    '<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    '<path d="M0,0 8,4 0,8z"/></marker>'
)


def figure(called: dict[str, list[str]], fresh: dict[str, list[str]]) -> str:
    """The drawing of a step from the files that each stage calls; those that it calls first of all are dark."""
    parts, top = [_arrow(0, "Guard.step(closure)")], GAP
    for stage, files in called.items():
        drawn, height = _box(stage, files, fresh[stage], top)
        parts += [*drawn, _arrow(top + height, HANDED_ON[stage])]
        top += height + GAP
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n<defs>{TIP}</defs>\n'
        f'<rect width="{WIDTH}" height="{top}" rx="10" fill="#f8fafc"/>\n{body}\n</svg>\n'
    )


def _box(stage: str, files: list[str], fresh: list[str], top: int) -> tuple[list[str], int]:
    rows = -(-len(files) // COLUMNS)
    height = HEAD + rows * ROW + 8
    column = (WIDTH - 2 * EDGE - 16) // COLUMNS
    parts = [
        f'<rect class="box" x="{EDGE}" y="{top}" width="{WIDTH - 2 * EDGE}" height="{height}" rx="8"/>',
        f'<text class="stage" x="{EDGE + 14}" y="{top + 23}">{stage}</text>',
        f'<text class="about" x="{EDGE + 92}" y="{top + 23}">{ABOUT[stage]}</text>',
    ]
    for i, file in enumerate(files):
        x, y = EDGE + 14 + i // rows * column, top + HEAD + 14 + i % rows * ROW
        again = "" if file in fresh else ' class="again"'
        parts.append(f'<text{again} x="{x}" y="{y}">{file}</text>')
    return parts, height


def _arrow(top: int, text: str) -> str:
    x = EDGE + 36
    return (
        f'<line x1="{x}" y1="{top + 5}" x2="{x}" y2="{top + GAP - 4}"/>'
        f'<text class="handed" x="{x + 14}" y="{top + GAP // 2 + 4}">{text}</text>'
    )


def main() -> None:
    from step_calls import files_by_stage, first_entered, median_step, recorded  # as a script: beside this one

    step = median_step(recorded())
    FIGURE.write_text(figure(files_by_stage(step), first_entered(step)), encoding="utf-8")


if __name__ == "__main__":
    main()
