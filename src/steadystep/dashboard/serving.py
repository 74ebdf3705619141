"""A port, and the server behind it."""

import errno
import ipaddress
import secrets
import socket
from pathlib import Path
from urllib.parse import quote

import uvicorn

from steadystep.dashboard.app import make_app
from steadystep.dashboard.library import Library
from steadystep.errors import ConfigError
from steadystep.report.site import environment


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach it.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket on that port; 0 takes any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # who follows the address before the server runs waits, and is not refused
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is taken: give another with --port, or --port 0 for any free one") from None
        raise ConfigError(f"cannot listen on {host} port {port} ({error.strerror or error})") from None
    return listening


def new_token() -> str:
    """Not to be guessed."""
    return secrets.token_urlsafe(24)


def address(host: str, listening: socket.socket, token: str | None) -> str:
    """What to type into a browser."""
    port = listening.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")


def prepare(root: Path) -> Library:
    """Look around and warm up before anybody is told the address, so that the first page is quick."""
    library = Library(root)
    library.summaries()
    for name in ("list.html", "row.html", "run.html"):
        environment().get_template(name)
    return library


def serve(library: Library, listening: socket.socket, *, token: str | None) -> None:
    """Until Ctrl-C."""
    config = uvicorn.Config(
        make_app(library, token=token, host=str(listening.getsockname()[0])),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listening])
