"""The server's routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Route

from steadystep.dashboard.access import Headers, TokenGate
from steadystep.dashboard.library import Library
from steadystep.dashboard.pages import Pages

_LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]", "::1", "testserver"]


def make_app(library: Library, *, token: str | None = None, host: str = "") -> Starlette:
    """The dashboard over one folder.

    Args:
        library: the runs; it reads in the background while the server runs.
        token: what a visitor must show; None only for a server that nobody else can reach.
        host: the address it listens on, where that is not one of the usual names of this machine.
    """
    pages = Pages(library)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with library:
            yield

    # why the host is checked: a foreign web page could point its own name at 127.0.0.1 and read what is here
    names = [*_LOCAL_NAMES, host] if host else _LOCAL_NAMES
    gate = Middleware(TrustedHostMiddleware, allowed_hosts=names) if token is None else Middleware(TokenGate, token)
    return Starlette(
        routes=[
            Route("/", pages.list),
            Route("/run", pages.run),
            Route("/compare", pages.compare),
            Route("/api/runs", pages.list_now),
            Route("/api/run", pages.run_now),
            Route("/style.css", pages.style),
            Route("/script.js", pages.script),
        ],
        middleware=[Middleware(Headers), gate, Middleware(GZipMiddleware, minimum_size=4096, compresslevel=1)],
        exception_handlers={HTTPException: pages.wrong, 404: pages.wrong, 500: pages.wrong},
        lifespan=lifespan,
    )
