"""Forward passes that all ranks make, or none: a closure that fails on one rank leaves no other waiting.

What is run again is the user's code at a time they did not expect, and may fail on one rank alone. The others would
then wait for it inside a collective of their forward or backward pass. So the ranks agree twice for each pass: on
entering the model, and after the closure, before backward. A pass that fails inside the model's forward, between two
collectives of its own, cannot be called off: it ends the run as it does without a guard, by the group's timeout.
"""

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn


class ElsewhereError(Exception):
    """The closure failed on another rank."""


def in_lockstep(
    work: Callable[..., Tensor], root: nn.Module, agree: Callable[[bool], bool], *, undo: Callable[[], None]
) -> Callable[..., Tensor]:
    """Return `work`, made by all ranks or by none.

    Args:
        work: computes a loss with `root`.
        root: the module whose call begins the collectives of a forward pass.
        agree: whether a flag is true on every rank; a collective.
        undo: called where it fails: brings the model into the form it has between two passes.

    Raises:
        ElsewhereError: on the ranks where it did not fail, when it failed on one.
    """

    def run(*batch: Any) -> Tensor:
        votes = _Votes(agree)
        handle = root.register_forward_pre_hook(votes.enter, prepend=True)  # why first: FSDP2 gathers weights in a hook
        try:
            loss = work(*batch)
            votes.enter()  # a closure that calls only parts of the model
            votes.cast(True)
        except Exception as error:
            if not isinstance(error, ElsewhereError):
                votes.cast(False)
            undo()
            raise
        finally:
            handle.remove()
        return loss

    return run


@final
class _Votes:
    """Those of one rank about one pass: on entering the model, or on failing before, and at its end."""

    def __init__(self, agree: Callable[[bool], bool]) -> None:
        self._agree = agree
        self._entered = False

    def enter(self, *_: object) -> None:
        """At the first call of the model."""
        if not self._entered:
            self.cast(True)

    def cast(self, well: bool) -> None:
        """Raise where all is well here and not on every rank."""
        self._entered = True
        if not self._agree(well) and well:
            raise ElsewhereError
