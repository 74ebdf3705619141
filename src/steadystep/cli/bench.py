"""`steadystep bench`: the tables: stability, precision, detection, recovery, overhead."""

from pathlib import Path

import typer


def bench(
    what: str = typer.Argument(help="stability, precision, detection, recovery or overhead."),
    quick: bool = typer.Option(False, "--quick", help="A few seeds and steps: shows that it runs, and no more."),
    seeds: str = typer.Option("", help="Instead of the study's own, such as 0-2 or 0,3,7."),
    jobs: int = typer.Option(0, min=0, help="Processes; 0 is one per core."),
    out: str = typer.Option("benchmarks/results", help="The folder of the results."),
    fresh: bool = typer.Option(False, "--fresh", help="Forget what is stored there and start anew."),
    table: bool = typer.Option(False, "--table", help="Show what is stored; run nothing."),
    as_json: bool = typer.Option(False, "--json", help="For a program."),
    figure: str = typer.Option("", help="Draw the results into this file (.png, .svg, .pdf)."),
) -> None:
    """Measure one of the tables in the README: stability, precision, detection, recovery or overhead.

    Each run is stored as soon as it has ended, so that Ctrl-C loses little: the same command goes on from there.
    Exit code 0: done. 1: some of its runs failed. 2: a mistake in the command. 130: Ctrl-C.

    Example: steadystep bench stability --quick
    """
    from steadystep.cli.bench_screen import show
    from steadystep.lab.bench import Choice, load
    from steadystep.lab.bench.seeds import parse_seeds

    choice = Choice(quick=quick, seeds=parse_seeds(seeds) if seeds else None)
    raise typer.Exit(
        show(
            load(what),
            choice,
            out=Path(out),
            num_workers=jobs or None,
            fresh=fresh,
            only_stored=table,
            as_json=as_json,
            figure=Path(figure) if figure else None,
        )
    )
