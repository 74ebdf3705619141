"""Signs in the outputs, each at its limits."""

import math
from typing import Any

from steadystep.diagnosis import batch_evidence
from steadystep.diagnosis import output_evidence as signs
from steadystep.diagnosis.causes import Fault
from tests.unit.diagnosis.limits import At, at_limits

LEARNED = (1.0, 0.1)  # the loss of the second half: at a constant's, and far below
HALF_LEARNED = 0.7
NO_LOSS = {"kind": "", "heard": False, "outputs.terms": 0}
NO_RIVALS = {"opposed": (False, True), "measured.rewarded": (False, True)}
BINARY = {"target.smallest": 0.0, "target.largest": 1.0, "target.binary": 1.0, "target.shape": (4,)}


def sinks(low: float, *, first: float = 1.0, count: int = 16) -> dict[str, Any]:
    """Losses that go down to `low` in the end."""
    return {"losses": [first] + [1.0] * (count - 5) + [low] * 4}


def falls(last: list[float], *, before: float = 1.0) -> dict[str, Any]:
    """Quarters of 16 losses each."""
    return {"losses": [1.0] * 32 + [before] * 16 + last}


def ends(*last: float, first: float = 0.5, then: float = 0.5, count: int = 256) -> dict[str, Any]:
    """Losses that end with these."""
    return {"losses": [first] + [then] * (count - 1 - len(last)) + list(last)}


def term(*values: float, whole: float = 10.0) -> dict[str, Any]:
    """Values of the first loss function at the probes."""
    return {"trail.pairs": [(whole, value) for value in values]}


def reaches(low: float, high: float) -> dict[str, Any]:
    return {"outputs.smallest": low, "outputs.largest": high}


def probed(count: int, *simplex: int) -> dict[str, Any]:
    return {"trail.count": count, "trail.simplex": list(simplex)}


@at_limits(
    At(
        signs.constant_outputs,
        {"outputs.spread": 0.0},
        {
            "first.spread": (1e-6, 1.1e-6),
            "last.spread": (1e-6, 1.1e-6),
            "outputs.shape": ((2, 4), (1, 4)),
            "first.input_spread": (0.1, 0.0),
            "trail.count": (3, 2),
            "end": LEARNED,
        },
        also=(({"outputs.rms": 4.0, "outputs.spread": 4e-6}, {"outputs.rms": 4.0, "outputs.spread": 4.1e-6}),),
        relative=True,
    ),
    At(
        signs.constant_outputs,
        {"outputs.distinct": 0.1},
        {"first.distinct": (0.49, 0.5), "last.distinct": (0.49, 0.5), "first.input_spread": (0.1, 0.0)},
        relative=True,
    ),
    At(
        signs.faint_outputs,
        {"first.spread": 0.01},
        {
            "first.spread": (0.029, 0.03),
            "first.input_spread": (0.1, 0.0),
            "first.shape": ((2, 4), (1, 4)),
            "trail.count": (3, 2),
            "kind": ("mse", ""),
            "end": LEARNED,
        },
        also=(({"first.rms": 4.0, "first.spread": 0.119}, {"first.rms": 4.0, "first.spread": 0.12}),),
        relative=True,
    ),
    At(
        signs.distance_of_shares,
        {"outputs.activation": "softmax", "target.smallest": 0.0, "target.largest": 1.0},
        {
            "last.activation": [("sigmoid", "relu"), ("softmax", "")],
            "last.kind": [("l1", "cross-entropy"), ("huber", "")],
            "target.smallest": (0.0, -0.1),
            "target.largest": (1.0, 0.9),
            "target.entropy": (0.1, 0.0),
            "heard": (True, False),
            "updates": (100, 99),
            "end": (HALF_LEARNED, 0.1),
        },
        also=(
            ({"last.activation": "sigmoid"}, {"last.activation": "sigmoid", "end": HALF_LEARNED}),
            (
                {"last.activation": "sigmoid", **reaches(0.1, 0.8)},
                {"last.activation": "sigmoid", **reaches(0.11, 0.8)},
            ),
            (
                {"last.activation": "sigmoid", **reaches(0.2, 0.9)},
                {"last.activation": "sigmoid", **reaches(0.2, 0.89)},
            ),
        ),
        relative=True,
    ),
    At(
        signs.bottomless,
        NO_LOSS | sinks(-16.0),
        {"kind": ("", "mse"), **NO_RIVALS},
        also=(
            (sinks(-10.1), sinks(-10.0)),
            (sinks(-10.1, first=0.1), sinks(-10.0, first=0.1)),
            (sinks(-30.1, first=-3.0), sinks(-30.0, first=-3.0)),
            (falls([-16.0] * 12 + [-1.6] * 4), falls([-16.0] * 12 + [-1.5] * 4)),
            (falls([-16.0] * 9 + [-2.0] * 7), falls([-16.0] * 7 + [-2.0] * 9)),
            (falls([-16.0] * 16, before=-15.9), falls([-16.0] * 16, before=-16.0)),
            (sinks(-16.0, count=16), sinks(-16.0, count=15)),
        ),
    ),
    At(
        signs.contracted,
        NO_LOSS | {"start": -1.0, "end": -1.0, "last.spread": 0.01},
        {
            "last.spread": (0.019, 0.02),
            "last.terms": (0, 1),
            "last.calls": (1, 2),
            "last.shape": [((32, 2), (32, 1)), ((32, 4), (32, 4, 4))],
            "first.input_spread": (0.1, 0.0),
            "trail.count": (3, 2),
            "kind": ("", "mse"),
            **NO_RIVALS,
        },
        also=(
            ({}, {"start": 1.0, "end": 1.0}),
            ({"first.spread": 4.0, "last.spread": 0.079}, {"first.spread": 4.0, "last.spread": 0.08}),
        ),
        relative=True,
    ),
    At(
        signs.far_from_outputs,
        NO_LOSS | {"start": 64.0, "end": 64.0, "last.rms": 0.5},
        {
            "last.rms": [(0.79, 0.8), (1e-3, 0.0)],
            "last.terms": (0, 1),
            "start": (64.0, 128.0),
            "updates": (200, 199),
            "warned": (("loss-spike",), ("clip-rate",)),
            "trail.count": (3, 2),
            "kind": ("", "mse"),
        },
        also=(({"start": 50.0, "end": 50.0}, {"start": 49.9, "end": 49.9}),),
    ),
    At(
        signs.content_rivals,
        {"loop.turns": 8, **ends(*[0.0] * 16, first=1.0, then=1.0, count=64)},
        {"loop.turns": (8, 7), "measured.rewarded": (False, True)},
        also=(
            (
                ends(*[0.0099] * 16, first=1.0, then=1.0, count=64),
                ends(*[0.01] * 16, first=1.0, then=1.0, count=64),
            ),
            ({}, ends(-0.01, *[0.0] * 15, first=1.0, then=1.0, count=64)),
            ({}, ends(*[0.0] * 16, first=1.0, then=1.0, count=63)),
            ({}, ends(*[0.0] * 16, first=0.0, then=1.0, count=64)),
        ),
        relative=True,
    ),
    At(
        batch_evidence.idle_term,
        {"kind": "", "outputs.kind": "mse", "outputs.terms": 2, "last.spread": 0.1, **term(*[1.0] * 8)},
        {
            "last.spread": (0.29, 0.3),
            "target.variance": (1.0, 0.0),
            "heard": (True, False),
            "last.kind": ("mse", ""),
            "kind": ("", "mse"),
            "updates": (100, 99),
            "curve": (..., None),
            **NO_RIVALS,
        },
        also=(
            (term(*[1.0] * 4), term(*[1.0] * 3)),
            ({"target.std": 2.0, "last.spread": 0.59}, {"target.std": 2.0, "last.spread": 0.6}),
            (term(*[0.9] * 4), term(*[0.89] * 4)),
            (term(*[3.0] * 4), term(*[3.1] * 4)),
            (term(9.0, 1.0, 1.0, 1.0), term(1.0, 9.0, 9.0, 9.0)),
            (term(5.0, 1.0, 1.0, 0.95), term(5.0, 1.0, 1.0, 0.94)),
            (
                {"last.kind": "cross-entropy", "last.rms": 2.0, "last.spread": 0.59, "target.std": 9.0},
                {"last.kind": "cross-entropy", "last.rms": 2.0, "last.spread": 0.6, "target.std": 9.0},
            ),
            (
                BINARY | {"last.kind": "bce with logits", "last.spread": 0.29, "target.std": 9.0},
                BINARY | {"last.kind": "bce with logits", "last.spread": 0.3, "target.std": 9.0},
            ),
            (
                BINARY | {"last.kind": "bce", "target.entropy": math.nan, **term(*[0.98] * 4)},
                BINARY | {"last.kind": "bce", "target.entropy": math.nan, **term(*[0.97] * 4)},
            ),
            (
                BINARY | {"last.kind": "bce", **term(*[0.9] * 4)},
                BINARY | {"last.kind": "bce", **term(*[0.89] * 4)},
            ),
        ),
        relative=True,
    ),
    At(
        signs.collapsed_outputs,
        NO_LOSS | {"last.calls": 2, "last.alignment": 0.999, "last.shape": (8, 4), "end": 0.1},
        {
            "last.calls": (2, 1),
            "last.alignment": (0.996, 0.995),
            "last.shape": [((8, 4), (7, 4)), ((8, 4), (8, 3)), ((9, 5), (8, 4, 4))],
            "end": (0.1, 0.11),
            "trail.count": (3, 2),
            "kind": ("", "mse"),
        },
        relative=True,
    ),
    At(
        signs.activation_twice,
        {"kind": "cross-entropy", "trail.simplex": [8, 0]},
        {
            "trail.simplex": ([8, 0], [7, 0]),
            "kind": ("cross-entropy", "nll"),
            "end": LEARNED,
            "trail.last": (..., None),
        },
        also=((probed(3, 3, 0), probed(2, 2, 0)),),
        relative=True,
    ),
    At(
        signs.activation_twice,
        {"kind": "bce with logits", "outputs.activation": "sigmoid", **reaches(0.0, 1.0)},
        {
            "outputs.smallest": (0.0, -0.01),
            "outputs.largest": (1.0, 1.01),
            "last.spread": (0.1, 0.0),
            "last.activation": ("sigmoid", ""),
            "kind": ("bce with logits", "bce"),
        },
        also=(({"last.activation": "", "last.kind": ""}, {"last.activation": ""}),),
        relative=True,
    ),
    At(
        signs.wrong_input_of_loss,
        {"kind": "nll", "outputs.largest": 0.5},
        {
            "outputs.largest": (0.0011, 0.001),
            "trail.count": (3, 2),
            "kind": [("broadcast mse", "mse"), ("nll", "cross-entropy")],
            "measured.rewarded": (False, True),
            "trail.last": (..., None),
        },
        also=(
            (
                {"outputs.largest": 0.0, "trail.simplex": [8, 0]},
                {"outputs.largest": 0.0, "trail.simplex": [7, 0]},
            ),
            ({"kind": "negative mse", "start": -1.0, "end": -1.0}, {"kind": "negative mse"}),
            ({"kind": "negative mse", "start": -1.0, "end": -1.0}, {"kind": "mse", "start": -1.0, "end": -1.0}),
        ),
    ),
    At(
        signs.out_of_reach,
        {"outputs.activation": "relu", "target.mean": 0.4, "target.smallest": -1.0},
        {
            "target.mean": (0.49, 0.5),
            "target.std": (0.81, 0.8),
            "target.smallest": (-0.1, 0.0),
            "last.activation": ("softplus", ""),
            "trail.count": (3, 2),
            "kind": [("l1", "cross-entropy"), ("huber", "")],
            "end": LEARNED,
        },
        relative=True,
    ),
    At(
        signs.out_of_reach,
        {"outputs.activation": "sigmoid", "target.mean": 9.0, **reaches(0.0, 1.0)},
        {
            "target.mean": [(1.6, 1.5), (-0.6, -0.5)],
            "outputs.largest": (1.0, 1.1),
            "outputs.smallest": (-1.0, -1.1),
        },
        also=(
            ({"last.activation": "", "outputs.largest": 0.9}, {"last.activation": "", "outputs.largest": 0.89}),
            ({"last.activation": "sigmoid", "outputs.largest": 0.5}, {"last.activation": "", "outputs.largest": 0.5}),
            (
                {"last.activation": "softmax", "outputs.largest": 0.5},
                {"last.activation": "relu", "outputs.largest": 0.5},
            ),
            ({"last.activation": "tanh", "outputs.largest": 0.5}, {"trail.last": None, "outputs.largest": 0.5}),
        ),
        relative=True,
    ),
    At(
        signs.negative_loss,
        {"start": -1.0, "end": -1.0},
        {
            "updates": (64, 63),
            "target.whole": (True, False),
            "target.shape": ((), (1,)),
            "curve": (..., None),
            **NO_RIVALS,
        },
        also=(
            ({"curve.start": -0.5, "curve.noise": 0.5}, {"curve.start": -0.5, "curve.noise": 0.49}),
            ({}, ends(first=0.0, then=-1.0)),
            (ends(0.0, *[-1.0] * 16, first=-1.0, then=-1.0), ends(0.0, *[-1.0] * 15, first=-1.0, then=-1.0)),
        ),
    ),
    At(
        signs.below_zero,
        NO_LOSS | BINARY | ends(*[-0.1] * 16),
        {
            "trail.count": (3, 2),
            "last.terms": (0, 1),
            "target.smallest": (0.0, -0.1),
            "target.largest": (1.0, 1.1),
            "target.shape": ((4,), (3,)),
            "trail.last": (..., None),
            **NO_RIVALS,
        },
        also=(
            ({"target.binary": 0.1, "target.values": 0}, {"target.binary": 0.0, "target.values": 0}),
            ({"target.binary": 0.0, "target.values": 2}, {"target.binary": 0.0, "target.values": 3}),
            (reaches(-0.1, 1.0), reaches(0.0, 1.0)),
            (reaches(0.0, 1.1), reaches(0.0, 1.0)),
            (ends(*[-0.1] * 16, first=0.0), ends(*[-0.1] * 16, first=-0.1)),
            (ends(*[-0.5] * 9), ends(*[-0.5] * 8)),
            ({}, ends(*[0.0] * 16)),
        ),
    ),
    At(
        signs.rectified_scores,
        {"kind": "cross-entropy", "last.activation": "relu"},
        {
            "last.activation": ("relu", "softplus"),
            "last.kind": [("nll", "mse"), ("bce with logits", "bce")],
            "updates": (100, 99),
            "trail.count": (3, 2),
            "opposed": (False, True),
            "end": (HALF_LEARNED, 0.1),
        },
        relative=True,
    ),
    At(
        batch_evidence.mostly_penalty,
        {"kind": "", "outputs.kind": "mse", "last.penalized": 1, **term(*[1.0] * 8)},
        {
            "last.penalized": (1, 0),
            "last.terms": (1, 2),
            "heard": (True, False),
            "last.kind": ("mse", "kl"),
            "updates": (100, 99),
            "trail.last": (..., None),
            **NO_RIVALS,
        },
        also=(
            (term(*[1.0] * 3), term(*[1.0] * 2)),
            (term(*[2.9] * 8), term(*[3.0] * 8)),
            (term(*[0.3] * 8), term(*[0.29] * 8)),
            (term(*[5.0] * 5, *[1.0] * 3), term(*[1.0] * 5, *[5.0] * 3)),
        ),
        relative=True,
    ),
    At(
        signs.softmax_over_batch,
        {"trail.simplex": [0, 8]},
        {
            "trail.simplex": [([0, 8], [1, 8]), ([0, 8], [0, 7])],
            "outputs.shape": [((2, 4), (1, 4)), ((2, 4), (2,))],
            "trail.last": (..., None),
        },
        also=((probed(3, 0, 3), probed(2, 0, 2)),),
    ),
    At(
        signs.softmax_over_batch,
        {"outputs.shape": (2, 1), **reaches(1.0, 1.0)},
        {"outputs.smallest": (1.0, 0.9), "outputs.largest": (1.0, 1.1), "outputs.shape": ((2, 1), (2, 2))},
    ),
    At(
        signs.wrong_axis,
        {"trail.wrong": {Fault.SOFTMAX_AXIS: 7}, "last.mistakes": ((Fault.SOFTMAX_AXIS, "over the batch"),)},
        {"trail.wrong": ({Fault.SOFTMAX_AXIS: 7}, {Fault.SOFTMAX_AXIS: 6}), "trail.last": (..., None)},
    ),
    At(
        signs.wrong_loss,
        {"trail.wrong": {Fault.WRONG_LOSS: 7}, "last.mistakes": ((Fault.WRONG_LOSS, "of scores"),)},
        {"last.mistakes": (..., ((Fault.SOFTMAX_AXIS, "over the batch"),))},
    ),
)
def test_it_is_said_at_its_limit_and_not_beyond(row: At) -> None:
    row.check()
