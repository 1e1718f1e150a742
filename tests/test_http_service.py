"""The app over a service that really writes and learns: what the fake promises is kept."""

import threading

import openai
import pytest
from pydantic import TypeAdapter
from served import FOX, LAW, serve
from serving import Running, until
from starlette.testclient import TestClient

from attractor.serve.config import ServeSettings
from attractor.serve.decode.engine import Job
from attractor.serve.http.app import create_app
from attractor.serve.http.status import Monitor
from attractor.serve.service import Limits


@pytest.fixture
def service(tmp_path):
    with serve(tmp_path) as service:
        yield service


def test_lessons_texts_and_back(service):
    with TestClient(create_app(service, ServeSettings()), base_url="http://127.0.0.1") as client:
        name = service.name
        lesson = {"texts": [FOX, FOX], "source": "fox", "idempotency_key": "one"}
        learned = client.post("/v1/learn", json=lesson).json()
        assert (learned["version"], learned["source"], learned["repeated"]) == (1, "fox", False)
        assert client.post("/v1/learn", json=lesson).json()["repeated"]
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [
            name,
            f"{name}:base",
            f"{name}:fox",
        ]
        form = {"model": name, "prompt": "the ", "max_tokens": 12, "seed": 3, "attractor": {"paths": True}}
        answer = client.post("/v1/completions", json=form).json()
        tokens = answer["choices"][0]["attractor"]["tokens"]
        assert "".join(token["text"] for token in tokens) == answer["choices"][0]["text"]
        assert all(set(token["shares"]) == {"base", "fox"} for token in tokens)
        assert all(sum(token["shares"].values()) == pytest.approx(1) for token in tokens)
        assert answer["usage"]["completion_tokens"] == len(tokens) == 12
        assert client.post("/v1/completions", json=form).json()["choices"] == answer["choices"]
        single = client.post("/v1/completions", json=form | {"model": f"{name}:fox"})
        assert single.json()["choices"][0]["finish_reason"] == "length"
        client.post("/v1/learn", json={"text": LAW, "source": "law"})
        assert client.delete("/v1/sources/fox").json()["version"] == 3
        assert client.delete("/v1/sources/fox").status_code == 404
        assert client.post("/v1/rollback", json={"version": 1}).json()["to"] == 1
        assert client.post("/v1/rollback", json={"version": 99}).status_code == 422
        assert (
            client.post("/v1/completions", json=form).json()["choices"][0]["text"]
            == answer["choices"][0]["text"]
        )
        assert [line["kind"] for line in client.get("/v1/versions").json()["data"]] == [
            "rollback",
            "drop",
            "lesson",
            "lesson",
        ]
        TypeAdapter(Monitor).validate_python(client.get("/v1/monitor").json())
        assert "attractor_version 4.0" in client.get("/metrics").text
        assert client.get("/ready").json()["ready"]


def test_an_erased_source_comes_back_with_no_rollback(service):
    with TestClient(create_app(service, ServeSettings()), base_url="http://127.0.0.1") as client:
        client.post("/v1/learn", json={"text": FOX, "source": "fox"})
        client.post("/v1/learn", json={"text": LAW, "source": "law"})
        asked = "/v1/sources/fox?erase=true&idempotency_key=gone"
        assert client.delete(asked).json()["erased"]
        assert client.delete(asked).json()["repeated"]
        reused = client.delete("/v1/sources/fox?idempotency_key=gone")
        assert (reused.status_code, reused.json()["error"]["code"]) == (422, "idempotency_key_reused")
        client.post("/v1/rollback", json={"version": 2})
        assert service.paths() == ["base", "law"]


def test_streams_keep_their_version_while_it_learns(service):
    settings = ServeSettings()
    stop = threading.Event()

    def learn():
        while not stop.is_set():
            service.learn([FOX], "fox", None)

    with Running(create_app(service, settings), settings) as running:
        teacher = threading.Thread(target=learn)
        teacher.start()
        try:
            url = f"http://127.0.0.1:{running.port}/v1"
            with openai.OpenAI(api_key="x", base_url=url, max_retries=0, timeout=300) as client:
                for seed in range(6):
                    stream = client.completions.create(
                        model=service.name, prompt="the ", max_tokens=16, seed=seed, stream=True
                    )
                    chunks = list(stream)
                    assert len({chunk.system_fingerprint for chunk in chunks}) == 1
                    assert chunks[-1].choices[0].finish_reason == "length"
        finally:
            stop.set()
            teacher.join()
    assert service.version > 0


def test_a_path_that_is_forgotten_while_a_text_waits_for_it(tmp_path):
    with (
        serve(tmp_path, limits=Limits(rows=1, drain=0.5)) as service,
        TestClient(create_app(service, ServeSettings()), base_url="http://127.0.0.1") as client,
    ):
        service.learn([FOX], "fox")
        ahead = service.submit(Job(prompt=[1], max_tokens=100_000))
        ahead.next()
        form = {"model": f"{service.name}:fox", "prompt": "the ", "max_tokens": 2}
        found = []
        asking = threading.Thread(target=lambda: found.append(client.post("/v1/completions", json=form)))
        asking.start()
        until(lambda: service.engine.stats()["waiting"])
        service.forget("fox")
        ahead.cancel()
        asking.join()
        assert (found[0].status_code, found[0].json()["error"]["code"]) == (404, "model_not_found")
