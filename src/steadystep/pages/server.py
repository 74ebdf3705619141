"""The server's routes."""

import errno
import hmac
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import final
from urllib.parse import quote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steadystep.errors import ConfigError
from steadystep.pages import template_engine
from steadystep.pages.dashboard import Pages
from steadystep.pages.library import Library

COOKIE = "steadystep-token"
_OPEN = ("/style.css", "/script.js")  # the same for everybody, and the page that asks for the token wants them
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@final
class Headers:
    """Adds the headers that keep a page to itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def strict(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = {name for name, _ in message["headers"]}
                extra = {"cache-control": "no-store", **_HEADERS}
                message["headers"] += [(k.encode(), v.encode()) for k, v in extra.items() if k.encode() not in known]
            await send(message)

        await self._app(scope, receive, strict)


@final
class TokenGate:
    """Lets in whoever shows the token: once in the address, then by a cookie; programs by a header."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if self._fits(request.query_params.get("token", "")):
            await self._welcome(request)(scope, receive, send)
        elif self._may_pass(scope["path"], request):
            await self._app(scope, receive, send)
        else:
            page = template_engine().get_template("token.html").render()
            await Response(page, status_code=401, media_type="text/html")(scope, receive, send)

    def _may_pass(self, path: str, request: Request) -> bool:
        # why not request.url: parts of it come from the Host header, which is the visitor's to choose
        shown = (request.cookies.get(COOKIE, ""), _bearer(request))
        return path in _OPEN or any(self._fits(one) for one in shown)

    def _fits(self, shown: str) -> bool:
        # why encoded: compare_digest refuses text that is not ASCII, and what is shown comes from outside
        return hmac.compare_digest(shown.encode(), self._token.encode())

    def _welcome(self, request: Request) -> Response:
        """The same page without the token in its address, where it would stay in the history."""
        rest = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
        path = "/" + quote(request.scope["path"]).lstrip("/")
        answer = RedirectResponse(f"{path}?{urlencode(rest)}" if rest else path, status_code=303)
        secure = request.scope.get("scheme") == "https"
        # why lax: a link from a chat or a notebook to a run should open; nothing here changes anything
        answer.set_cookie(COOKIE, self._token, httponly=True, samesite="lax", secure=secure)
        return answer


def _bearer(request: Request) -> str:
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    return value if kind.lower() == "bearer" else ""


_LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]", "::1", "testserver"]


def make_app(library: Library, *, token: str | None = None, host: str = "") -> Starlette:
    """Return the dashboard over one folder as a Starlette application.

    Args:
        library: the runs; read in the background while the server runs.
        token: what a visitor must present; None only for a server that nobody else can reach.
        host: the address it listens on, if that is not one of the usual names of this machine.
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
            raise ConfigError(
                f"port {port} is in use: choose another with --port, or --port 0 for any free one"
            ) from None
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
    for name in ("list.html", "run.html"):
        template_engine().get_template(name)
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
