"""`steadystep dashboard`: many runs as a live page."""

from pathlib import Path

import typer

from steadystep.errors import ConfigError


def dashboard(
    folder: str = typer.Argument("runs", help="The folder with the runs, however deep they are in it."),
    port: int = typer.Option(8700, min=0, max=65535, help="0 takes any free port."),
    host: str = typer.Option("127.0.0.1", help="Another address lets others in, with a token."),
    token: str = typer.Option("", help="What visitors must show; made and printed when left out."),
    show: bool = typer.Option(False, "--open", help="Open it in a browser."),
) -> None:
    """All runs in a folder as a live page: health at a glance, curves as they grow, incidents, comparisons.

    Only this machine can reach it unless --host says otherwise; then a token is needed. Ctrl-C ends it.
    Exit code 0: ended by you. 2: no such folder, the port is taken, or the extra is not installed.

    Example: steadystep dashboard runs --open
    """
    try:
        from steadystep.dashboard.serving import address, is_loopback, listen, new_token, prepare, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'steadystep[dashboard]'") from None

    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(
            f"{root}: no such folder; runs go where Guard(..., run_dir=...) or `steadystep train` put them"
        )
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError("--token: use plain letters and digits, they go into an address")
    shown = token or (None if is_loopback(host) else new_token())
    listening = listen(host, port)
    library = prepare(root)
    where = address(host, listening, shown)
    typer.echo(f"{where}  (Ctrl-C ends it)")
    if show:
        typer.launch(where)
    try:
        serve(library, listening, token=shown)
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
    typer.echo("ended", err=True)
