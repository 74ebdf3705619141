import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from steadystep.errors import ConfigError
from steadystep.pages.dashboard import RunRows
from steadystep.pages.library import Library
from steadystep.pages.run_list import QUIET_S, RunSummary, glance, places, spark_heights
from steadystep.pages.server import COOKIE, address, listen, make_app
from steadystep.runs.run import Series
from tests.unit.pages.report_runs import made_run, steadystep, write_log

EVIL = "<script>alert(1)<script>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    write_log(root / "good", made_run(400, troubled=False))
    write_log(root / "deep" / "er" / "broken", made_run(400), ended=False)
    write_log(root / EVIL, made_run(200, seed=2))
    return root


@pytest.fixture
def library(folder: Path) -> Library:
    made = Library(folder)
    made.summaries()
    made.read_all()
    return made


@pytest.fixture
def client(folder: Path) -> TestClient:
    return TestClient(make_app(Library(folder)), raise_server_exceptions=False)


def test_the_list_shows_every_run_with_its_health(library: Library) -> None:
    found = {one.key: one for one in library.summaries()}
    assert set(found) == {"good", "deep/er/broken", EVIL}
    good, broken = found["good"], found["deep/er/broken"]
    assert good.known
    assert good.state() == "finished"
    assert (good.steps, good.incidents, good.severity) == (400, 0, "")
    assert good.said
    assert good.spark.heights.startswith("z")
    assert broken.state() == "running"
    assert (broken.interventions, broken.severity) == (2, "critical")
    assert len(broken.spark.marks) == 2


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"ended": True, "end": "finished"}, "finished"),
        ({"ended": True, "end": "stopped"}, "stopped"),
        ({"ended": True, "end": "error"}, "stopped"),
        ({"ended": False, "changed": 1000.0 - QUIET_S + 1}, "running"),
        ({"ended": False, "changed": 1000.0 - QUIET_S - 1}, "stale"),
        ({"ended": None, "changed": 1000.0 - QUIET_S - 1}, "idle"),
    ],
)
def test_states(facts: dict, state: str) -> None:
    assert RunSummary(**{"key": "a", "name": "a", "changed": 0.0, **facts}).state(now=1000.0) == state


def test_before_anything_is_read_a_glance_shows_the_curve(folder: Path) -> None:
    first = {one.key: one for one in Library(folder).summaries()}["good"]
    assert not first.known
    assert first.steps == 400
    assert first.loss == pytest.approx(2.0, abs=0.3)
    assert len(first.spark.heights) > 20


def test_a_glance_at_nonsense_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(os.urandom(5000))
    assert len(glance(path)) == 0
    assert len(glance(tmp_path / "missing")) == 0


def test_what_grows_is_read_on(folder: Path, library: Library) -> None:
    shelf = library.find("deep/er/broken")
    assert shelf is not None
    before = shelf.run()
    with (folder / "deep" / "er" / "broken" / "run.jsonl").open("a") as log:
        log.write('{"step":400,"loss":1.5,"norm":1.0,"lr":0.1}\n')
    after = shelf.run()
    assert (len(before.run.loss), len(after.run.loss)) == (400, 401)
    assert after.edition > before.edition
    assert shelf.run().edition == after.edition
    assert shelf.waits
    library.read_all()
    assert library.find("deep/er/broken").summary.steps == 401  # type: ignore[union-attr]


def test_a_run_that_cannot_be_read_says_so_and_harms_no_other(folder: Path) -> None:
    (folder / "odd").mkdir()
    (folder / "odd" / "run.jsonl").write_bytes(b"\x00\xff" * 500)
    library = Library(folder)
    library.summaries()
    library.read_all()
    found = {one.key: one for one in library.summaries()}
    assert "not a run log" in found["odd"].problem
    assert found["good"].said
    assert TestClient(make_app(library)).get("/run?name=odd").status_code == 422


def test_other_tools_logs_are_found(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss\n0,1\n")
    (tmp_path / "people.csv").write_text("name,age\na,1\n")
    (tmp_path / "hf" / "checkpoint-20").mkdir(parents=True)
    for count in (5, 20):
        (tmp_path / "hf" / f"checkpoint-{count}").mkdir(exist_ok=True)
        (tmp_path / "hf" / f"checkpoint-{count}" / "trainer_state.json").write_text("{}")
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "events.out.tfevents.1").write_bytes(b"")
    found = {place.key: place.path.name for place in places(tmp_path)}
    assert found == {"log.csv": "log.csv", "hf": "trainer_state.json", "tb": "tb"}
    assert next(p for p in places(tmp_path) if p.key == "hf").path.parent.name == "checkpoint-20"


def test_links_do_not_lead_outside(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_log(tmp_path / "secret", made_run(50))
    write_log(root / "mine", made_run(50))
    (root / "folder").symlink_to(tmp_path / "secret", target_is_directory=True)
    (root / "loop").symlink_to(root, target_is_directory=True)
    (root / "file").mkdir()
    (root / "file" / "run.jsonl").symlink_to(tmp_path / "secret" / "run.jsonl")
    (root / "inside").symlink_to(root / "mine", target_is_directory=True)
    assert {place.key for place in places(root)} <= {"mine", "inside"}
    assert len(places(root)) == 1


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "good/../../secret", "", ".", "..", "good\x00", "%2e%2e"])
def test_no_name_leads_outside(client: TestClient, folder: Path, name: str) -> None:
    write_log(folder.parent / "secret", made_run(50))
    for page in ("/run", "/api/run"):
        assert client.get(page, params={"name": name}).status_code == 404
    assert client.get("/compare", params={"run": ["good", name]}).status_code == 404


def test_names_are_only_text(client: TestClient) -> None:
    for page in ("/", f"/run?name={EVIL}", f"/compare?run={EVIL}&run=good"):
        text = client.get(page).text
        assert "<script>alert" not in text
        assert "script&gt;alert(1)" in text or "script\\u003ealert(1)" in text
    assert EVIL in {row["key"] for row in client.get("/api/runs").json()["rows"]}


def test_headers_are_strict_everywhere(client: TestClient) -> None:
    for page in ("/", "/run?name=good", "/nope", "/style.css", "/api/runs"):
        headers = client.get(page).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"


def test_no_page_holds_what_the_policy_forbids(client: TestClient) -> None:
    for page in ("/", "/run?name=deep/er/broken", "/compare?run=good&run=deep/er/broken"):
        text = client.get(page).text
        assert " style=" not in text
        assert " onclick" not in text
        assert "https://" not in text


def test_nothing_here_is_a_page_too(client: TestClient) -> None:
    answer = client.get("/nope")
    assert answer.status_code == 404
    assert "Not found." in answer.text
    assert client.get("/api/run?name=nope").json() == {"error": "Not found."}
    assert client.post("/").status_code == 405


def test_the_live_answer_is_only_sent_when_something_changed(client: TestClient, folder: Path) -> None:
    told = client.get("/api/run?name=deep/er/broken&seen=").json()
    assert told["charts"]["panels"][0]["key"] == "loss"
    assert "damaged-weights" in told["parts"]["cases"]
    assert client.get("/api/run", params={"name": "deep/er/broken", "seen": told["version"]}).status_code == 204
    with (folder / "deep" / "er" / "broken" / "run.jsonl").open("a") as log:
        log.write('{"step":400,"loss":1.5,"norm":1.0,"lr":0.1}\n')
    again = client.get("/api/run", params={"name": "deep/er/broken", "seen": told["version"]}).json()
    assert again["charts"]["panels"][0]["lines"][0]["x"][-1] == 400
    listed = client.get("/api/runs").json()
    assert client.get("/api/runs", params={"seen": listed["version"]}).status_code == 204
    assert len(client.get("/api/runs", params={"seen": "other-99"}).json()["rows"]) == len(listed["keys"])


def test_the_list_is_sent_only_what_has_changed(tmp_path: Path) -> None:
    for number in range(3):
        write_log(tmp_path / f"run-{number}", made_run(60, troubled=False, hparams={"lr": 0.1}))
    library = Library(tmp_path)
    library.read_all()
    rows, before = RunRows(), library.summaries()
    first = rows.since("", before)
    assert len(first["rows"]) == len(first["keys"]) == 3
    changed = rows.since(first["version"], [replace(before[0], loss=7.0), *before[1:]])
    assert [(row["key"], row["loss"]) for row in changed["rows"]] == [(before[0].key, 7.0)]
    assert changed["keys"] is None
    gone = rows.since(changed["version"], before[1:])
    assert (gone["rows"], gone["keys"]) == ([], [one.key for one in before[1:]])


def test_a_part_of_a_long_run_comes_in_detail(tmp_path: Path) -> None:
    write_log(tmp_path / "long", made_run(20_000))
    client = TestClient(make_app(Library(tmp_path)))
    whole = client.get("/api/run?name=long&seen=").json()["charts"]["panels"][0]["lines"][0]["x"]
    part = client.get("/api/run?name=long&seen=&first=9990&last=10010").json()["charts"]["panels"][0]["lines"][0]["x"]
    assert len(whole) < 2000
    assert part == list(range(9989, 10012))
    assert client.get("/api/run?name=long&seen=&first=x&last=1e9").status_code == 200


def test_compare_needs_two(client: TestClient) -> None:
    assert client.get("/compare?run=good").status_code == 400
    assert "2 runs compared" in client.get("/compare?run=good&run=deep/er/broken").text


def test_a_foreign_name_for_this_machine_is_refused(client: TestClient) -> None:
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/", headers={"host": "localhost:8700"}).status_code == 200


def test_the_token_opens_the_door_once_and_then_the_cookie(library: Library) -> None:
    client = TestClient(make_app(library, token="s3cret"), follow_redirects=False)
    for attempt in ("/", "/?token=wrong", "/api/runs", "/run?name=good", "/?token=", "/?token=\u00e9"):
        assert client.get(attempt).status_code == 401
    assert "Token required" in client.get("/").text
    assert client.get("/style.css").status_code == 200
    welcome = client.get("/run?name=good&token=s3cret")
    assert (welcome.status_code, welcome.headers["location"]) == (303, "/run?name=good")
    assert "httponly" in welcome.headers["set-cookie"].lower()
    assert "samesite=lax" in welcome.headers["set-cookie"].lower()
    assert client.get("/").status_code == 200
    client.cookies.clear()
    assert client.get("/", headers={"cookie": f"{COOKIE}=other"}).status_code == 401
    assert client.get("/", headers={"authorization": "Bearer s3cret"}).status_code == 200
    assert client.get("http://testserver//evil.example/?token=s3cret").headers["location"].startswith("/evil")


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    text = TestClient(make_app(Library(tmp_path))).get("/").text
    assert "No runs here yet" in text
    assert "run_dir=" in text


def test_a_taken_port_is_a_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use"):
            listen("127.0.0.1", port)
        assert steadystep("dashboard", str(tmp_path), "--port", str(port)) == 2
    assert "--port 0" in capsys.readouterr().err
    assert steadystep("dashboard", str(tmp_path / "none")) == 2
    assert "no such folder" in capsys.readouterr().err


def test_any_free_port() -> None:
    with listen("127.0.0.1", 0) as listening:
        where = address("127.0.0.1", listening, "abc")
        assert where == f"http://127.0.0.1:{listening.getsockname()[1]}/?token=abc"


def test_a_host_for_others_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr("steadystep.pages.server.serve", lambda library, listening, token: asked.append(token))
    monkeypatch.setattr("steadystep.pages.server.listen", lambda host, port: socket.socket())
    for arguments in ((), ("--host", "0.0.0.0"), ("--host", "0.0.0.0", "--token", "mine")):
        assert steadystep("dashboard", str(tmp_path), *arguments) == 0
    assert asked[0] is None
    assert len(asked[1] or "") >= 32
    assert asked[2] == "mine"


def test_a_sparkline_has_a_gap_for_nan() -> None:
    told = spark_heights(Series(np.arange(5), np.array([1.0, 2.0, np.nan, 2.0, 1.0])))
    assert told == "0z.z0"
    assert spark_heights(Series()) == ""


def test_only_some_runs_stay_in_memory(tmp_path: Path) -> None:
    for number in range(16):
        write_log(tmp_path / str(number), made_run(40))
    library = Library(tmp_path)
    library.summaries()
    library.read_all()
    shelves = [library.find(str(number)) for number in range(16)]
    assert sum(shelf.held for shelf in shelves if shelf) == 12
    assert all(one.known for one in library.summaries())
    assert json.loads(json.dumps([one.steps for one in library.summaries()])) == [40] * 16
