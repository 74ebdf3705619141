"""Who may look, and what a page may do. A token where the server is open to others, strict headers everywhere."""

import hmac
from typing import final
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steadystep.report.site import environment

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
            page = environment().get_template("token.html").render()
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
