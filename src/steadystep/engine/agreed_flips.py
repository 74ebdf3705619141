"""Bits that flipped on one rank, as all ranks know them."""

import json
from dataclasses import asdict, replace
from typing import final

from steadystep.parallel import Ranks
from steadystep.records import BitFlip
from steadystep.signals.gradients import GradientView

NAMED = 8  # tensors in a record
ROOM = 1000  # bytes of what a rank can tell the others


@final
class AgreedFlips:
    """Makes those of one rank known to all: all of them compute the step again.

    Each rank compares and repairs what it holds. What it could not repair it gets from a rank that found nothing, which
    needs no majority: checksums tell who is right, among two as well.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._mine: tuple[BitFlip, ...] = ()
        self._any = ranks.any_rank(lambda: bool(self._mine))

    def agree(self, view: GradientView) -> GradientView:
        """The signals of all ranks, as `Ranks.agree` gives them, with the flips of all."""
        self._mine = view.signals.bit_flips
        view = self._ranks.agree(view)
        if not self._any():
            return view
        said = [asdict(flip) | {"rank": self._ranks.rank} for flip in self._mine[:NAMED]]
        while len(json.dumps(said).encode()) > ROOM:
            said.pop()
        every = [json.loads(text) for text in self._ranks.texts(json.dumps(said))]
        flips = tuple(BitFlip(**one) for of_rank in every for one in of_rank)
        signals = replace(view.signals, bit_flips=flips)
        odd = {flip.rank: flip.tensor for flip in flips if not flip.repaired}
        healthy = next((rank for rank in range(self._ranks.size) if rank not in odd), None)
        if odd and healthy is not None:
            names = tuple(f"{name} on rank {rank}" for rank, name in odd.items())
            signals = replace(signals, odd_replicas=names, healthy_rank=healthy)
        return replace(view, signals=signals)
