"""The checklist for a script: each item with the line it was concluded from. Absence is no fault, so none is a hit."""

from collections.abc import Iterator

from steadystep.lint.checklist_run import checkpoints, decay, nan_filter, seed, validation
from steadystep.lint.checklist_step import clipping, nan_check, norms, precision, schedule, warmup
from steadystep.lint.context import Context
from steadystep.lint.hit import Item
from steadystep.lint.marks import Marks

_ITEMS = (clipping, warmup, schedule, precision, nan_check, norms, checkpoints, validation, seed, decay)


def checklist(context: Context) -> Iterator[Item]:
    """All items, in the order of a training step; nothing for a script that does not train."""
    marks = Marks(context)
    if not (context.trains or marks.hugging_face or marks.lightning):
        return
    for find in _ITEMS:
        yield find(context, marks)
    if marks.hugging_face:
        yield nan_filter(marks)
