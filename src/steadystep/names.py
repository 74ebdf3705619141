"""Names of modules and parameters as their owner knows them, and names a user may have meant."""

import difflib
from collections.abc import Sequence


def nearest_names(wanted: str, known: Sequence[str], *, count: int = 3) -> str:
    """A clause for an error message: the known names nearest to `wanted`, or the first few."""
    close = difflib.get_close_matches(wanted.strip("*."), [name for name in known if name], n=count, cutoff=0.4)
    shown = close or [name for name in known if name][:count]
    return f": did you mean {', '.join(repr(name) for name in shown)}?" if shown else ""


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain(name: str) -> str:
    """A dotted name without what torch.compile, FSDP and checkpointing put in between.

    >>> plain("blocks.0._orig_mod.mlp")
    'blocks.0.mlp'
    """
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
