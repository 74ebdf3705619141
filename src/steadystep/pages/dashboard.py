"""What the server answers. Reading is done in threads, so that one long log does not keep the others waiting."""

import json
import math
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, final

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from steadystep._utils.text import count, number
from steadystep.errors import SteadystepError
from steadystep.pages import script, style, template_engine
from steadystep.pages.incident_groups import Headline, incident_groups
from steadystep.pages.library import CachedRun, Library, RunCache
from steadystep.pages.report import charts, compare_parts, view
from steadystep.pages.run_list import RunSummary
from steadystep.records import GRAVE
from steadystep.runs.comparison import compare

_BUCKETS = 600  # a chart on a wide screen
_MOST_COMPARED = 60
_FIRST_ROWS = 100  # in the page itself
_PENDING = Headline(said="Reading the curves …", healthy=True)


@final
class Pages:
    """The answers, from one library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._rows = RunRows()

    async def list(self, request: Request) -> Response:
        """All runs; the page itself asks for those beyond the first."""
        found = await run_in_threadpool(self._library.summaries)
        first = [row(one, time.time()) for one in found[:_FIRST_ROWS]]
        return _page("list.html", root=str(self._library.root), many=_many(found), rows=first)

    async def list_now(self, request: Request) -> Response:
        """The rows that have changed since the page last asked."""
        found = await run_in_threadpool(self._library.summaries)
        told = self._rows.since(request.query_params.get("seen", ""), found)
        return _data({"many": _many(found), **told}, request, told["version"])

    async def run(self, request: Request) -> Response:
        """One run."""
        cache = await self._cache(request.query_params.get("name", ""))
        kept = await run_in_threadpool(_kept, cache)
        told = await run_in_threadpool(self._told, cache, kept, None, None)
        return _page("run.html", name=cache.place.key, stamp=_version(cache, kept), **told)

    async def run_now(self, request: Request) -> Response:
        """What has changed of it; with `first` and `last`, those steps in detail."""
        cache = await self._cache(request.query_params.get("name", ""))
        kept = await run_in_threadpool(_kept, cache)
        version = _version(cache, kept)
        if request.query_params.get("seen") == version:
            return Response(status_code=204)
        told = await run_in_threadpool(self._told, cache, kept, _step(request, "first"), _step(request, "last"))
        parts: Any = template_engine().get_template("run_parts.html").module
        html = {
            "head": parts.head(told["view"], told["state"]),
            "signs": parts.signs(told["view"]),
            "cases": parts.cases(told["view"]),
        }
        return _data({"charts": told["charts"], "parts": html}, request, version)

    async def compare(self, request: Request) -> Response:
        """Several runs over each other."""
        keys = list(dict.fromkeys(request.query_params.getlist("run")))[:_MOST_COMPARED]
        if len(keys) < 2:
            raise HTTPException(400, "Select two or more runs in the list.")
        caches = [await self._cache(key) for key in keys]
        try:
            runs = [(await run_in_threadpool(cache.run)).run for cache in caches]
            compared = await run_in_threadpool(compare, runs)
        except SteadystepError as error:
            raise HTTPException(422, str(error)) from None
        return _page("compared.html", **await run_in_threadpool(compare_parts, runs, compared))

    async def wrong(self, request: Request, error: Exception) -> Response:
        """Anything that has no page."""
        code = error.status_code if isinstance(error, HTTPException) else 500
        said = error.detail if isinstance(error, HTTPException) and code != 404 else "Not found."
        if request.scope["path"].startswith("/api/"):
            return Response(json.dumps({"error": said}), status_code=code, media_type="application/json")
        return _page("wrong.html", code=code, said=said, status=code)

    async def style(self, request: Request) -> Response:
        """Of all pages."""
        return Response(style(), media_type="text/css", headers={"cache-control": "max-age=60"})

    async def script(self, request: Request) -> Response:
        """Of all pages."""
        return Response(script(), media_type="text/javascript", headers={"cache-control": "max-age=60"})

    async def _cache(self, key: str) -> RunCache:
        cache = await run_in_threadpool(self._library.find, key)
        if cache is None:
            raise HTTPException(404)
        return cache

    def _told(self, cache: RunCache, kept: CachedRun, first: int | None, last: int | None) -> dict[str, Any]:
        verdict = kept.verdict or _PENDING
        whole = view(kept.run, verdict, buckets=_BUCKETS, near=False)
        drawn = whole.charts
        if first is not None or last is not None:
            drawn = charts(kept.run, incident_groups(kept.run), verdict, buckets=_BUCKETS, first=first, last=last)
        return {"view": whole, "charts": drawn, "state": cache.summary.state()}


def row(run: RunSummary, now: float) -> dict[str, Any]:
    """What the page of the list gets about a run."""
    tag = None
    if run.interventions:
        tag = (count(run.interventions, "incident"), run.severity)
    elif run.severity in GRAVE:
        tag = (count(run.incidents, "observation"), run.severity)
    elif run.known and run.healthy and not run.problem and run.source == "steadystep":
        tag = ("healthy", "good")
    state = run.state(now)
    return {
        "key": run.key,
        "state": state,
        "dot": "stopped" if state == "finished" and run.healthy is False else state,
        "changed": round(run.changed),
        "known": run.known,
        "steps": run.steps,
        "loss": _told(run.loss),
        "val": _told(run.val_loss),
        "incidents": run.interventions,
        "tag": tag,
        "said": run.problem or run.said or "reading…",
        "ill": bool(run.problem) or run.healthy is False,
        "spark": run.spark.heights,
        "marks": run.spark.marks,
        "hparams": dict(run.hparams),
    }


def _told(value: float | None) -> float | str | None:
    """For JSON, which has no NaN."""
    return value if value is None or math.isfinite(value) else number(value)


def _many(found: Sequence[RunSummary]) -> str:
    running = sum(one.state() == "running" for one in found)
    return count(len(found), "run") + (f", {running} running" if running else "")


@final
class RunRows:
    """Rows of the list, each with the edition in which it last changed: a page is sent what it has not seen."""

    def __init__(self) -> None:
        self._server = secrets.token_hex(4)  # editions of another process are not ours
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[dict[str, Any], int]] = {}
        self._edition = self._gone = 0

    def since(self, seen: str, found: Sequence[RunSummary]) -> dict[str, Any]:
        """Return rows newer than `seen`, all keys if some have come or gone, and the version that this makes."""
        now = time.time()
        server, _, edition = seen.partition("-")
        known = int(edition) if server == self._server and edition.isdecimal() else 0
        with self._lock:
            fresh = {one.key: row(one, now) for one in found}
            changed = {key for key, made in fresh.items() if self._rows.get(key, ({}, 0))[0] != made}
            if changed or fresh.keys() != self._rows.keys():
                self._edition += 1
                self._gone = self._edition if fresh.keys() != self._rows.keys() else self._gone
                old = self._rows
                self._rows = {k: (made, self._edition) if k in changed else old[k] for k, made in fresh.items()}
            rows = [made for made, at in self._rows.values() if at > known]
            keys = list(self._rows) if self._gone > known else None
            return {"version": f"{self._server}-{self._edition}", "rows": rows, "keys": keys}


def _kept(cache: RunCache) -> CachedRun:
    try:
        return cache.run()
    except SteadystepError as error:
        raise HTTPException(422, str(error)) from None


def _version(cache: RunCache, kept: CachedRun) -> str:
    return f"{kept.edition}-{cache.summary.state()}"


def _step(request: Request, name: str) -> int | None:
    try:
        return max(-(2**62), min(2**62, int(request.query_params[name])))
    except (KeyError, ValueError):
        return None


def _page(template: str, *, status: int = 200, **context: Any) -> Response:
    page: str = template_engine().get_template(template).render(**context)
    # why: a name on disk, or a text in a log, may hold what UTF-8 has no bytes for
    return HTMLResponse(page.encode("utf-8", errors="replace"), status_code=status)


def _data(answer: dict[str, Any], request: Request, version: str) -> Response:
    if request.query_params.get("seen") == version:
        return Response(status_code=204)
    answer = {"version": version, **answer}
    return Response(json.dumps(answer, separators=(",", ":"), allow_nan=False), media_type="application/json")
