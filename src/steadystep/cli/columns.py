"""`--column ROLE=NAME`, for logs whose names do not tell."""

from typing import Annotated

import typer

from steadystep.errors import ConfigError

Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="ROLE=NAME",
        help="step, loss, grad_norm, lr or val_loss, where the names do not tell.",
    ),
]


def by_role(given: list[str] | None) -> dict[str, str]:
    """What was given, as a mapping."""
    asked = {}
    for pair in given or []:
        role, equals, name = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--column {pair}: write it as ROLE=NAME, such as loss=my_loss")
        asked[role.strip()] = name
    return asked
