"""What visitors and logs can bring along that nobody asked for."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.testclient import TestClient

from steadystep.pages import run_list as places_module
from steadystep.pages.library import Library
from steadystep.pages.run_list import glance, places
from steadystep.pages.server import address, listen, make_app, serve
from steadystep.tracking.sinks import EventFile
from tests.unit.pages.report_runs import made_run, write_log


def status_of(app: Any, path: str, *, host: str, query: str = "") -> int:
    """What a server answers to a request whose parts need not fit together."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "query_string": query.encode(),
        "headers": [(b"host", host.encode())],
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    with ThreadPoolExecutor(1) as pool:  # the browser of other tests has a loop running in this thread
        pool.submit(asyncio.run, app(scope, receive, send)).result()
    return int(sent[0]["status"])


@pytest.mark.parametrize("host", ["x/style.css?", "x/script.js#", "x/style.css"])
def test_the_host_header_opens_no_door(tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # some versions of Starlette put the Host header and the path together without a look at either
    monkeypatch.setattr(Request, "url", property(lambda self: URL(f"http://{host}{self.scope['path']}")))
    app = make_app(Library(tmp_path), token="s3cret")
    for path in ("/", "/api/runs"):
        assert status_of(app, path, host=host) == 401
    assert status_of(app, "/style.css", host=host) == 200
    assert status_of(app, "/", host=host, query="token=s3cret") == 303


def test_an_odd_token_works_from_the_printed_address_to_the_cookie(tmp_path: Path) -> None:
    token = "a&b=c #;+"
    with listen("127.0.0.1", 0) as listening:
        where = address("127.0.0.1", listening, token)
    client = TestClient(make_app(Library(tmp_path), token=token), follow_redirects=False)
    assert client.get("/" + where.split("/", 3)[3]).status_code == 303
    assert client.get("/").status_code == 200


def test_a_strange_cookie_beside_ours_does_no_harm(tmp_path: Path) -> None:
    client = TestClient(make_app(Library(tmp_path), token="s3cret"))
    # what a whole-header parser stumbles over; browsers send every cookie of the host, whoever set it
    assert client.get("/", headers={"cookie": 'odd={"a": 1}; steadystep-token=s3cret'}).status_code == 200


def test_the_bound_address_is_a_name_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apps: list[Any] = []
    monkeypatch.setattr("uvicorn.Config", lambda app, **_: apps.append(app))
    monkeypatch.setattr("uvicorn.Server", lambda config: type("Server", (), {"run": lambda self, sockets: None})())
    with socket.socket() as listening:
        listening.bind(("127.0.0.2", 0))
        serve(Library(tmp_path), listening, token=None)
    assert TestClient(apps[0]).get("/", headers={"host": "127.0.0.2:8700"}).status_code == 200
    assert TestClient(apps[0]).get("/", headers={"host": "127.0.0.3:8700"}).status_code == 400


def events(folder: Path, level: float) -> None:
    file = EventFile(folder, step=0)
    for step in range(50):
        file.scalars(step, {"Loss/train": level})
    file.close()


def test_only_the_files_that_were_found_are_read(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    events(root / "tb", 5.0)
    events(tmp_path / "secret", 9.0)
    (root / "tb" / "validation").symlink_to(tmp_path / "secret", target_is_directory=True)
    next((tmp_path / "secret").iterdir()).rename(tmp_path / "secret" / "z.tfevents.1")
    (root / "tb" / "z.tfevents.9").symlink_to(tmp_path / "secret" / "z.tfevents.1")
    shelf = Library(root).find("tb")
    assert shelf is not None
    assert set(shelf.run().run.loss.values) == {5.0}
    assert not shelf.run().run.validation


def test_a_run_inside_a_folder_of_events_is_another_one(tmp_path: Path) -> None:
    events(tmp_path / "outer", 5.0)
    write_log(tmp_path / "outer" / "inner", made_run(40))
    library = Library(tmp_path)
    library.summaries()
    library.read_all()
    found = {one.key: one for one in library.summaries()}
    assert (found["outer"].source, found["outer/inner"].source) == ("tensorboard", "steadystep")


def huge_step(root: Path) -> None:
    with write_log(root / "odd", made_run(40)).open("a") as log:
        log.write('{"step":1' + "0" * 30 + ',"loss":1.0,"norm":1.0,"lr":0.1}\n' + '{"step":99,"torn\n')


def huge_loss(root: Path) -> None:
    with write_log(root / "odd", made_run(40)).open("a") as log:
        log.write('{"step":41,"loss":1' + "0" * 400 + ',"norm":1.0,"lr":0.1}\n{"step":99,"torn\n')


def link_loop(root: Path) -> None:
    (root / "odd").symlink_to("odd")
    (root / "run.jsonl.csv").symlink_to("run.jsonl.csv")


def odd_name(root: Path) -> None:
    write_log(Path(os.fsdecode(os.fsencode(root) + b"/b\xffd")), made_run(40))


def odd_words(root: Path) -> None:
    with write_log(root / "odd", made_run(40)).open("a") as log:
        log.write(r'{"kind":"incident","step":39,"done":"\ud800","diagnosis":{"cause":"a\ud800b"}}' + "\n")


@pytest.mark.parametrize("oddity", [huge_step, huge_loss, link_loop, odd_name, odd_words])
def test_one_odd_entry_does_not_take_the_others_down(tmp_path: Path, oddity: Callable[[Path], None]) -> None:
    write_log(tmp_path / "good", made_run(40))
    oddity(tmp_path)
    library = Library(tmp_path)
    client = TestClient(make_app(library))
    assert "good" in client.get("/").text
    library.read_all()
    assert client.get("/api/runs").status_code == 200
    for key in [one.key for one in library.summaries()]:
        key.encode()
        assert client.get("/run", params={"name": key}).status_code == 200


def test_a_glance_skips_what_is_no_step(tmp_path: Path) -> None:
    huge_step(tmp_path)
    assert glance(tmp_path / "odd" / "run.jsonl").steps[-1] == 39


def test_the_reader_survives_any_failure_and_says_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_log(tmp_path / "bad", made_run(40, name="bad"))
    write_log(tmp_path / "good", made_run(40, name="good"))
    from steadystep.pages import library
    from steadystep.pages.incident_groups import headline

    def fails(run: Any) -> Any:
        if run.name == "bad":
            raise ZeroDivisionError("nobody thought of this")
        return headline(run)

    monkeypatch.setattr(library, "headline", fails)
    library = Library(tmp_path)
    library.summaries()
    with caplog.at_level(logging.WARNING, logger="steadystep"):
        for _ in range(3):
            library.read_all()
    found = {one.key: one for one in library.summaries()}
    assert "nobody thought of this" in found["bad"].problem
    assert found["good"].said
    assert len(caplog.records) == 1


def test_the_thread_goes_on_after_a_failed_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from steadystep.pages import library as module

    walks = iter([OSError("gone"), OSError("gone")])
    turns = iter([False, False, False, True])

    def walk(root: Path) -> Any:
        raise next(walks)

    monkeypatch.setattr(module, "places", walk)
    library = Library(tmp_path)
    library._over.wait = lambda timeout=None: next(turns)  # type: ignore[method-assign]
    library._work()
    assert list(turns) == []


def test_a_walk_leaves_out_packages_and_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("node_modules", "site-packages", "__pycache__", ".git", "kept"):
        write_log(tmp_path / name / "run", made_run(20))
    assert [place.key for place in places(tmp_path)] == ["kept/run"]
    for number in range(9):
        write_log(tmp_path / f"z{number}", made_run(20))
    monkeypatch.setattr(places_module, "_MOST_FOLDERS", 5)
    assert len(places(tmp_path)) == 3


def test_an_empty_folder_is_not_walked_at_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from steadystep.pages import library as module

    walks: list[Path] = []
    monkeypatch.setattr(module, "places", lambda root: walks.append(root) or ())
    library = Library(tmp_path)
    for _ in range(5):
        library.summaries()
    assert len(walks) == 1
