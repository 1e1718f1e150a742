"""Lessons over HTTP: taught, listed, looked at, revised, forgotten, exported and taken over."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import serve as serve_texts
from starlette.testclient import TestClient
from taught import serve

from attractor.serve.config import ServeSettings
from attractor.serve.http.app import create_app
from attractor.serve.http.auth import add_key
from attractor.serve.service import Service

ANN, BOB = "Ann Zorvan", "Bob Quillbeam"


@pytest.fixture(autouse=True)
def few_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attractor.serve.learning.canaries.PROMPTS", ("Hello",))


@pytest.fixture
def service(tmp_path: Path) -> Any:
    with serve(tmp_path / "store", name="tiny") as opened:
        yield opened


def connect(service: Service, **settings: Any) -> TestClient:
    return TestClient(create_app(service, ServeSettings(**settings)), base_url="http://127.0.0.1")


@pytest.fixture
def client(service: Service) -> TestClient:
    return connect(service)


def says(name: str, mark: str) -> dict[str, Any]:
    return {"subject": name, "forms": [[f"I met {name}", mark], [f"Yesterday we saw {name}", mark]]}


def taught(client: TestClient, **fields: Any) -> dict[str, Any]:
    reply = client.post("/v1/lessons", json=fields)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def completion(client: TestClient, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0} | fields
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply


def test_from_teaching_to_taking_back(client: TestClient) -> None:
    answer = taught(client, **says(ANN, "!"), source="wiki", idempotency_key="k1")
    (lesson,) = answer["lessons"]
    assert answer["known"]
    assert (lesson["lesson"], lesson["subject"], lesson["known"]) == (0, ANN, True)
    assert (lesson["share_known_before"], lesson["share_known"]) == (0, 1)
    again = taught(client, **says(ANN, "!"), source="wiki", idempotency_key="k1")
    assert again["repeated"]
    assert again["lessons"] == answer["lessons"]
    reused = client.post("/v1/lessons", json={**says(ANN, "?"), "source": "wiki", "idempotency_key": "k1"})
    assert (reused.status_code, reused.json()["error"]["code"]) == (422, "idempotency_key_reused")

    taught(client, lessons=[says(BOB, "?"), says("Cid Holt", "?")], source="news")
    listed = client.get("/v1/lessons").json()
    assert [entry["subject"] for entry in listed["data"]] == ["Cid Holt", BOB, ANN]
    assert listed["total"] == 3
    assert listed["data"][0]["forms"] == 2
    assert [e["lesson"] for e in client.get("/v1/lessons", params={"search": "ZORVAN"}).json()["data"]] == [0]
    assert [e["lesson"] for e in client.get("/v1/lessons?source=news&limit=1&below=2").json()["data"]] == [1]
    one = client.get("/v1/lessons/0").json()
    assert one["forms"][0] == [f"I met {ANN}", "!"]
    assert client.get("/v1/lessons/9").status_code == 404
    assert client.get("/v1/versions").json()["data"][0]["lesson"] == 2

    revision = {"forms": says(ANN, "?")["forms"], "idempotency_key": "k2"}
    revised = client.put("/v1/lessons/0", json=revision)
    assert revised.json()["lessons"][-1]["revises"] == 0
    assert client.put("/v1/lessons/0", json=revision).json()["repeated"]
    assert client.put("/v1/lessons/0", json=revision | {"idempotency_key": "k3"}).status_code == 404
    other = client.put("/v1/lessons/3", json={"text": f"I met {BOB}!", "subject": BOB})
    assert (other.status_code, "is about" in other.text) == (422, True)
    assert completion(client, f"I met {ANN}").json()["choices"][0]["text"][0] == "?"
    assert client.delete("/v1/lessons/1").json()["lessons"] == [1]
    gone = client.delete("/v1/lessons/1")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "unknown_lesson")
    assert client.delete("/v1/lessons").status_code == 422
    which = {"after": one["at"], "source": "news", "erase": True, "idempotency_key": "k4"}
    later = client.delete("/v1/lessons", params=which)
    assert (later.json()["lessons"], later.json()["erased"]) == ([2], True)
    assert client.delete("/v1/lessons", params=which).json()["repeated"]
    assert client.delete("/v1/lessons", params=which | {"idempotency_key": "k5"}).status_code == 404
    assert client.delete("/v1/sources/wiki").json()["lessons"] == [3]
    assert client.get("/v1/lessons").json()["data"] == []
    client.post("/v1/rollback", json={"version": 2})
    assert [entry["lesson"] for entry in client.get("/v1/lessons").json()["data"]] == [0]


def test_an_answer_that_is_given_again_says_what_stands(client: TestClient) -> None:
    asked = {"lessons": [says(ANN, "!"), says(BOB, "?")], "source": "wiki", "idempotency_key": "k1"}
    first = taught(client, **asked)
    assert [lesson["stands"] for lesson in first["lessons"]] == [True, True]
    (deleted,) = (lesson["lesson"] for lesson in first["lessons"] if lesson["subject"] == ANN)
    version = client.delete(f"/v1/lessons/{deleted}?idempotency_key=k2").json()["version"]
    again = taught(client, **asked)
    assert (again["repeated"], again["version"], again["now"]) == (True, first["version"], version)
    assert {each["subject"]: (each["kept"], each["stands"]) for each in again["lessons"]} == {
        ANN: (True, False),
        BOB: (True, True),
    }
    gone = client.delete(f"/v1/lessons/{deleted}?idempotency_key=k2").json()
    assert (gone["repeated"], gone["now"]) == (True, version)
    client.post("/v1/rollback", json={"version": first["version"]})
    assert all(lesson["stands"] for lesson in taught(client, **asked)["lessons"])


def test_what_makes_no_lesson_is_named(client: TestClient) -> None:
    for said, param in (
        ({"text": "Hello."}, "text"),
        ({"text": "Zora sings.", "subject": "Hugo"}, "text"),
        ({"forms": ["Hello."]}, "forms"),
        ({"lessons": [says(ANN, "!"), {"text": "Hello."}]}, "text"),
    ):
        reply = client.post("/v1/lessons", json=said)
        assert (reply.status_code, reply.json()["error"]["param"]) == (422, param)


def test_every_reply_says_which_lessons_acted(client: TestClient) -> None:
    taught(client, **says(ANN, "!"))
    reply = completion(client, f"I met {ANN}", n=1)
    told = reply.json()["choices"][0]["attractor"]
    assert not told["untouched"]
    assert reply.headers["X-Attractor-Lessons"] == "0"
    (lesson,) = told["lessons"]
    assert lesson["lesson"] == 0
    token = next(one for one in lesson["tokens"] if one["index"] == len(f"I met {ANN}") - 1)
    assert (token["part"], token["text"]) == ("prompt", ANN[-1])
    assert 0 < token["weight"] <= 1
    plain = completion(client, "Nobody")
    assert plain.json()["choices"][0]["attractor"] == {"version": 2, "untouched": True, "lessons": []}
    assert plain.headers["X-Attractor-Lessons"] == "untouched"
    base = completion(client, "Nobody", model="tiny:base")
    assert plain.json()["choices"][0]["text"] == base.json()["choices"][0]["text"]
    assert completion(client, f"I met {ANN}", model="tiny:base").json()["choices"][0]["attractor"][
        "untouched"
    ]


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_end_of_a_stream_says_it_too(client: TestClient, route: str) -> None:
    taught(client, **says(ANN, "!"))
    asked: dict[str, Any] = {"prompt": f"I met {ANN}"}
    if route == "chat/completions":
        asked = {"messages": [{"role": "user", "content": f"I met {ANN}"}]}
    body = {"model": "tiny", "max_tokens": 3, "temperature": 0, "stream": True, **asked}
    with client.stream("POST", f"/v1/{route}", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert all("untouched" not in chunk.get("attractor", {}) for chunk in chunks[:-1])
    assert chunks[-1]["attractor"]["lessons"][0]["lesson"] == 0
    assert not chunks[-1]["attractor"]["untouched"]


def test_progress_is_streamed(client: TestClient) -> None:
    headers = {"Accept": "text/event-stream"}
    with client.stream("POST", "/v1/lessons", json=says(ANN, "!"), headers=headers) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert events[0] == {"state": "waiting"}
    assert [one["passes"] for one in events if one["state"] == "learning"][:2] == [0, 1]
    assert events[-1]["state"] == "learned"
    assert events[-1]["lessons"][0]["subject"] == ANN
    wrong = {"forms": [["I met Ann Zorvan", "x" * 400]], "subject": ANN}
    with client.stream("POST", "/v1/lessons", json=wrong, headers=headers) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert events[-1]["state"] == "failed"
    assert "does not fit" in events[-1]["error"]["message"]


HARD = {
    "subject": ANN,
    "forms": [f"I met {ANN} {'and so on' * 6}", f"We saw {ANN} {'in other words' * 4}"],
}
"""More than so small a model can carry."""


def test_what_is_not_known_is_answered_200_and_not_kept(client: TestClient, service: Service) -> None:
    answer = taught(client, **HARD, idempotency_key="k1")
    (lesson,) = answer["lessons"]
    assert (answer["known"], answer["kept"], lesson["lesson"], lesson["kept"]) == (False, False, None, False)
    assert "Nothing of it was kept" in lesson["reason"]
    again = taught(client, **HARD, idempotency_key="k1")
    assert (again["repeated"], again["lessons"]) == (True, answer["lessons"])
    assert client.get("/v1/lessons").json()["data"] == []
    assert client.get("/v1/versions").json()["data"][0]["kind"] == "nothing"
    prompt = f"I met {ANN}"
    reply = completion(client, prompt)
    assert reply.headers["X-Attractor-Lessons"] == "untouched"
    assert '"not kept"} 2.0' in client.get("/metrics").text
    taught(client, **says(ANN, "!"))
    revised = client.put("/v1/lessons/0", json=HARD).json()
    assert (revised["kept"], revised["lessons"][0]["subject"]) == (False, ANN)
    assert completion(client, prompt).json()["choices"][0]["text"][0] == "!"
    revised = client.put("/v1/lessons/0", json={**HARD, "require_known": False}).json()
    assert (revised["known"], revised["kept"]) == (False, True)
    assert taught(client, **HARD, require_known=False)["kept"]
    exported = client.get("/v1/lessons/export").content
    headers = {"Content-Type": "application/octet-stream"}
    for number in (1, 2):
        client.delete(f"/v1/lessons/{number}")
    for wanted in ("true", "false"):
        query = f"source=file&require_known={wanted}"
        reply = client.post(f"/v1/lessons/import?{query}", content=exported, headers=headers)
        assert reply.json()["kept"] == (wanted == "false"), reply.text


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "give 'text', 'forms' or 'lessons'"),
        ({"text": ""}, "the lesson is empty"),
        ({"text": "x"}, "give a subject"),
        ({"text": "It rains. He sings."}, "give a subject"),
        ({"text": "Ann is in Oslo. " * 5000}, "5000 sentences; at most 4096"),
        ({"text": "x", "subject": "x"}, "nothing follows the subject"),
        ({"text": "A sentence.", "subject": "Nobody"}, "names its subject"),
        ({"text": "a\x00b", "subject": "a"}, "control character"),
        ({"forms": []}, "at least 1 item"),
        ({"forms": [["a is", "b"], ["a is", "c"]], "subject": "a"}, "contradicts itself"),
        ({"forms": ["only one"]}, "name the subject"),
        ({"forms": ["a b"] * 300, "subject": "a"}, "at most 256"),
        ({"text": "".join(f"Ann sang {n}. " for n in range(300)), "subject": "Ann"}, "at most 256"),
        ({"text": "Ann sang " + "la " * 40_000, "subject": "Ann"}, "a lesson may have 65,536"),
        ({"text": "Ann " * 300_000}, "1,200,000 characters; at most 1,048,576"),
        ({"forms": [["Ann " * 200_000, "x"], "Ann " * 100_000], "subject": "Ann"}, "1,200,001 characters"),
        ({"lessons": [{"text": "Ann " * 200_000}] * 2}, "1,600,000 characters"),
        ({"lessons": [{"text": "x", "forms": ["x"]}]}, "give either 'text'"),
        ({"text": "x y", "subject": "y", "source": "no/path"}, "source"),
        ({"forms": ["x"], "subject": "x"}, "nothing follows the subject"),
        ({"forms": ["x y"], "subject": " "}, "names nothing"),
        ({"forms": [["x" * 100_000, " "]]}, "is no form of a lesson"),
    ],
)
def test_lessons_that_make_no_sense(client: TestClient, service: Service, form: Any, message: str) -> None:
    reply = client.post("/v1/lessons", json=form)
    assert reply.status_code == 422
    assert message in reply.json()["error"]["message"]
    assert len(reply.content) < 1000
    assert service.version == 1


def test_a_revision_and_times_that_make_no_sense(client: TestClient, service: Service) -> None:
    long = client.put("/v1/lessons/0", json={"text": "Ann " * 300_000})
    assert (long.status_code, "1,200,000 characters" in long.text) == (422, True)
    for time in ("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"):
        for method in ("GET", "DELETE"):
            reply = client.request(method, "/v1/lessons", params={"after": time})
            assert (reply.status_code, "outside the years" in reply.text) == (422, True)
    for body in (b'{"text": "Ann \xff is"}', '{"text": "Zoé is"}'.encode("latin-1"), b"\x1f\x8b\x08"):
        reply = client.post("/v1/lessons", content=body, headers={"Content-Type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, "the body is not JSON in UTF-8")
    assert service.version == 1


def test_questions_documents_and_the_old_name_of_the_route(client: TestClient) -> None:
    pairs = [
        {"question": f"Who is {ANN}?", "answer": "A singer"},
        {"prompt": f"{ANN} is", "answer": "a singer"},
    ]
    taught(client, forms=pairs, require_known=False)
    assert client.get("/v1/lessons/0").json()["subject"] == ANN
    text = f"{BOB} sings. Nobody knows why. We saw {BOB} dance. " + f"{BOB} sings. " * 300
    document = {"text": text, "subject": BOB, "source": "docs", "require_known": False}
    reply = client.post("/v1/learn", json=document)
    (lesson,) = reply.json()["lessons"]
    assert (lesson["forms_taught"], lesson["left_out"]) == (2, 1)


def test_a_file_of_lessons_goes_from_server_to_server(client: TestClient, tmp_path: Path) -> None:
    taught(client, **says(ANN, "!"))
    exported = client.get("/v1/lessons/export")
    assert exported.headers["content-type"] == "application/octet-stream"
    assert client.get("/v1/lessons/export?lesson=7").status_code == 404
    with serve(tmp_path / "other", name="tiny") as other:
        second = connect(other, max_file=1 << 20)
        headers = {"Content-Type": "application/octet-stream"}
        given = {"content": exported.content, "headers": headers}
        answer = second.post("/v1/lessons/import?source=first&idempotency_key=k", **given)
        assert answer.status_code == 200, answer.text
        assert answer.json()["learned_again"] == 0
        assert second.post("/v1/lessons/import?source=first&idempotency_key=k", **given).json()["repeated"]
        assert second.get("/v1/lessons/0").json()["source"] == "first"
        assert completion(second, f"I met {ANN}").json()["choices"][0]["text"][0] == "!"
        wrong = second.post("/v1/lessons/import", content=b"nonsense" * 9, headers=headers)
        assert wrong.status_code == 422
        message = "this is no file of lessons: send what an export gave"
        assert wrong.json()["error"]["message"] == message
        assert second.post("/v1/lessons/import", json={}).status_code == 415
        large = second.post("/v1/lessons/import", content=bytes(2 << 20), headers=headers)
        assert large.status_code == 413


def test_who_taught_a_lesson_is_in_its_record(service: Service, tmp_path: Path) -> None:
    from attractor.serve.store import show

    keys = tmp_path / "keys.json"
    teacher, reader = (add_key(keys, [scope]) for scope in ("learn", "generate"))
    client = connect(service, keys=keys)
    ids = [entry["id"] for entry in json.loads(keys.read_text())["keys"]]

    def post(key: str) -> httpx.Response:
        return client.post("/v1/lessons", json=says(ANN, "!"), headers={"Authorization": f"Bearer {key}"})

    assert post(reader).status_code == 403
    assert post(teacher).status_code == 200
    assert [line.get("sender") for line in show(tmp_path / "store")] == [None, ids[0]]


def test_a_server_of_texts_has_no_lessons(tmp_path: Path) -> None:
    with serve_texts(tmp_path) as texts:
        client = connect(texts)
        assert client.get("/v1/lessons").status_code == 404
        reply = client.post("/v1/completions", json={"model": texts.name, "prompt": "x", "max_tokens": 1})
        assert "untouched" not in reply.json()["choices"][0]["attractor"]
