"""Words for people."""

import warnings
from pathlib import Path

import steadystep
from steadystep._utils.text import plain_name, warn


def test_a_warning_is_attributed_to_the_first_caller_outside_the_package() -> None:
    room = Path(steadystep.__file__).parent / "engine" / "build.py"  # a file of the package that calls warn()
    names = {"warn": warn}
    exec(compile("def call():\n    warn('hello')\n", str(room), "exec"), names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names["call"]()  # type: ignore[call-arg]
    assert caught[0].filename == __file__


def test_names_are_plain_whatever_is_wrapped_inside() -> None:
    assert plain_name("blocks.0._orig_mod.mlp._fsdp_wrapped_module.up") == "blocks.0.mlp.up"
