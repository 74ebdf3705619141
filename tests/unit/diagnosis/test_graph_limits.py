"""Signs in the graph of the loss, each at its limits."""

import math
from typing import Any

from steadystep.diagnosis import graph_evidence as signs
from tests.unit.diagnosis.limits import At, at_limits, run
from tests.unit.diagnosis.made import finding, tallies, tally

LEARNED = (1.0, 0.1)  # the loss of the second half: at a constant's, and far below
SOMEWHAT = (0.7, 0.1)  # neither stuck nor halved, and far below
ROWS = tuple(f"{place}.weight" for place in range(8))
ALL = {"0.weight", "2.weight"}
USUAL = {"inputs.mean": [(19.9, 20.0), (-19.9, -20.0)], "inputs.std": (19.9, 20.0)}


def moved(*updates: float, of: str = "probe", names: tuple[str, ...] = ROWS, weight: float = 1.0) -> dict[str, Any]:
    """Updates of so many weights."""
    count = len(updates)
    columns = {"names": names[:count], "weight_rms": (1.0,) * (count - 1) + (weight,), "update_rms": updates}
    return {f"{of}.{name}": value for name, value in columns.items()} | {"measured.touched": set(ROWS)}


def began(*updates: float) -> dict[str, Any]:
    return moved(*updates, of="first_probe")


def trained(count: int, **more: Any) -> dict[str, Any]:
    return {"structure.trained": ROWS[:count], **more}


def overflow(*where: str, step: int = 1, what: str = "infinite", more: tuple[str, ...] = ()) -> dict[str, Any]:
    seen = {"non-finite-gradient": tally(finding("non-finite", "act", step=step, what=what, where=where))}
    return {"incidents": seen | tallies(*more)}


def loud(low: int, norm: float = 1e4) -> dict[str, Any]:
    """Gradient norms, the first few of which are small."""
    return {"norms": [1.0] * low + [norm] * (64 - low) + [1.0] * 192}


@at_limits(
    At(
        signs.never_trained,
        {"measured.touched": {"0.weight"}},
        {"measured.touched": [({"0.weight"}, ALL), (..., set())], "updates": (50, 49), "end": [LEARNED, (1.0, 0.9)]},
        also=(
            (
                trained(3, **{"measured.touched": set(ROWS[:2])}),
                trained(4, **{"measured.touched": set(ROWS[:3])}),
            ),
        ),
    ),
    At(
        signs.behind_no_grad,
        {"last.unlinked": ("a",)},
        {
            "measured.touched": (set(), {"a"}),
            "updates": (50, 49),
            "end": SOMEWHAT,
            "trail.last": (..., None),
        },
    ),
    At(
        signs.in_no_optimizer,
        {"structure.unheld": ("a",)},
        {
            "structure.unheld": (("a",), ()),
            "last.unheld": [(("a",), ("b",)), (None, ())],
            "updates": (100, 99),
            "opposed": (False, True),
            "measured.rewarded": (False, True),
            "end": SOMEWHAT,
        },
        also=(
            ({"end": 0.1, "last.untrained": ("a",)}, {"end": 0.1}),
            ({"last.untrained": ("a",)}, {"last.untrained": ("a",), "opposed": True}),
            ({"last.untrained": ("a",)}, {"last.untrained": ("a",), "updates": 99}),
        ),
    ),
    At(
        signs.outside_the_model,
        {"last.outside": 1},
        {
            "last.outside": (1, 0),
            "measured.rewarded": (False, True),
            "end": SOMEWHAT,
            "trail.last": (..., None),
        },
    ),
    At(
        signs.cut_graph,
        {"last.cuts": ("detach",)},
        {
            "last.cuts": (("detach",), ()),
            "last.terms": (1, 2),
            "kind": ("mse", ""),
            "end": LEARNED,
            "trail.last": (..., None),
        },
    ),
    At(
        signs.inner_axis,
        {"trail.wrong": {"inner softmax-axis": 8}, "last.mistakes": (("inner softmax-axis", "over one element"),)},
        {"end": SOMEWHAT, "trail.wrong": (..., {})},
    ),
    At(
        signs.batch_as_time,
        {"last.misread": ("rnn",)},
        {"last.misread": (("rnn",), ()), "end": SOMEWHAT, "trail.last": (..., None)},
    ),
    At(
        signs.severed,
        {"last.severed": ("a",), "measured.touched": ALL},
        {
            "last.severed": (("a",), ()),
            "measured.touched": [(ALL, {*ALL, "a"}), (ALL, {"0.weight"})],
            "opposed": (False, True),
            "loop.turns": (0, 1),
            "updates": (50, 49),
        },
        also=(
            (
                trained(4, end=0.1, **{"measured.touched": set(ROWS)}),
                trained(5, end=0.1, **{"measured.touched": set(ROWS)}),
            ),
        ),
    ),
    At(
        signs.starved_layers,
        moved(1e-9, 1e-9, 1.0),
        {"structure.scale_free": (False, True), "updates": (100, 99), "end": SOMEWHAT, "probe.update_rms": (..., ())},
        also=(
            (moved(9.9e-5, 9.9e-5, 1.0), moved(1e-4, 1e-4, 1.0)),
            (moved(1e-9, 1e-9, 1.0, 1.0), moved(1e-9, 1e-9, 1.0, 1.0, 1.0)),
            (moved(1e-9, 1e-9, 1.0), moved(1e-9, 1.0)),
            ({}, moved(1e-9, 1e-9, 1.0, weight=0.0)),
            ({}, moved(1e-9, 1e-9, 1.0, names=("0.bias", "1.weight", "2.weight"))),
            ({}, {"measured.touched": {"2.weight"}}),
        ),
    ),
    At(
        signs.slow_layers,
        moved(9.9e-4, 9.9e-4, 1.0) | {"structure.scale_free": True},
        {"structure.scale_free": (True, False)},
        also=(({}, moved(1e-3, 1e-3, 1.0)),),
    ),
    At(
        signs.fading,
        began(1e-3, 1e-3, 1.0, 1.0, 1.0, 1.0),
        {"structure.scale_free": (False, True), "end": (0.81, 0.8), "first_probe.update_rms": (..., ())},
        also=(
            (began(9.9e-3, 9.9e-3, 1.0, 1.0, 1.0, 1.0), began(1e-3, 1e-2, 1.0, 1.0, 1.0, 1.0)),
            (began(1e-3, 1e-3, 0.1, 0.1, 1.0, 0.1), began(1e-3, 1e-3, 0.1, 1.0, 0.1, 0.1)),
            (began(1e-3, 1.0, 1.0, 1.0, 1.0), began(1e-3, 1.0, 1.0, 1.0)),
            ({}, began(1e-3, 1.0, 1.0, 1.0, 1.0) | {"first_probe.names": ("0.bias", *ROWS[1:5])}),
            ({}, {"first_probe.weight_rms": (0.0, 0.0, 1.0, 1.0, 1.0, 1.0)}),
        ),
    ),
    At(
        signs.sharp_softmax,
        {"first.sharpest": 0.96},
        {"first.sharpest": [(0.951, 0.95), (0.96, math.nan)], "updates": (100, 99), "trail.count": (3, 2)},
        also=(({"end": 0.7}, {"end": 0.1}),),
    ),
    At(
        signs.faint_part,
        {"outputs.faintest": 0.0},
        {
            "first.faintest": (1e-6, 1.1e-6),
            "last.faintest": (1e-6, 1.1e-6),
            "first.input_spread": (0.1, 0.0),
            "opposed": (False, True),
            "trail.count": (3, 2),
            "end": SOMEWHAT,
        },
    ),
    At(
        signs.loud_start,
        {"start": 100.0, "end": 2.0, "norms": [100.0] * 256},
        {
            "start": (100.0, 99.0),
            "end": (1.11, 1.09),
            "norms": (..., [99.0] + [100.0] * 255),
            "target.std": (50.0, 50.1),
            "target.mean": [(50.0, 50.1), (-50.0, -50.1)],
            "kind": ("mse", ""),
            **USUAL,
        },
    ),
    At(
        signs.high_first_loss,
        {"kind": "cross-entropy", "start": 11.0},
        {
            "start": (10.1, 10.0),
            "kind": [("nll", "mse"), ("cross-entropy", "")],
            "updates": (100, 99),
            "end": LEARNED,
            **USUAL,
        },
    ),
    At(
        signs.far_above,
        {"kind": "", "outputs.kind": "mse", "outputs.terms": 2, "start": 60.0, "end": 60.0, "norms": [101.0] * 256},
        {
            "curve.late": (60.0, 59.9),
            "last.terms": (2, 1),
            "last.kind": [("l1", "cross-entropy"), ("huber", "")],
            "updates": (100, 99),
            "norms": ([101.0] + [1.0] * 255, [100.0] * 256),
            "target.std": (19.9, 20.0),
            "target.mean": [(19.9, 20.0), (-19.9, -20.0)],
            "heard": (True, False),
            "opposed": (False, True),
            "measured.rewarded": (False, True),
            "kind": ("", "mse"),
            "curve": (..., None),
            "trail.count": (3, 2),
        },
    ),
    At(
        signs.infinite_at_once,
        overflow("a", "b", "c"),
        also=(
            ({}, {"incidents": {}}),
            ({}, overflow("a", "b", "c", step=2)),
            ({}, overflow("a", "b")),
            ({}, overflow("a", "b", "c", what="NaN")),
            ({}, overflow("a", "b", "c", more=("non-finite-loss",))),
        ),
    ),
    At(
        signs.loud_gradients,
        {"start": 1e4, **loud(0)},
        {
            "start": (1e4, 9999.0),
            "curve.best": [(0.1, 2.0), (1.0, -2.0)],
            "target.mean": [(19.9, 20.0), (-19.9, -20.0)],
            "target.std": (19.9, 20.0),
            "curve": (..., None),
            "end": LEARNED,
            **USUAL,
        },
        also=((loud(32), loud(33)), ({}, loud(0, 9999.0))),
    ),
)
def test_it_is_said_at_its_limit_and_not_beyond(row: At) -> None:
    row.check()


def test_what_cuts_parameters_off_is_named() -> None:
    cut = {"last.severed": ("a",), "last.cuts": ("detach",), "measured.touched": {"0.weight"}}
    assert signs.severed(run(cut)) == ""
    assert "behind detach()" in signs.never_trained(run(cut))
    assert "behind detach()" in signs.severed(run(cut | {"measured.touched": ALL}))
    assert "behind" not in signs.severed(run(cut | {"measured.touched": ALL, "last.cuts": ()}))
