"""Texts, as OpenAI's own client and plain requests get them from an app with a fake service."""

import asyncio
import json

import openai
import pytest
from fake_service import BUSY, LINE
from serving import Running, until

from attractor.serve.config import ServeSettings
from attractor.serve.http.app import create_app


@pytest.fixture
def running(service):
    settings = ServeSettings()
    with Running(create_app(service, settings), settings) as running:
        yield running


@pytest.fixture
def official(running):
    with openai.OpenAI(
        api_key="unused", base_url=f"http://127.0.0.1:{running.port}/v1", max_retries=0, timeout=300
    ) as client:
        yield client


def completion(client, **fields):
    return client.post("/v1/completions", json={"model": "fake", "prompt": "A", **fields})


def events(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# --- the official client


def test_the_official_client_lists_models(official, service):
    service.learn(["text"], "kjv", None)
    assert [model.id for model in official.models.list()] == ["fake", "fake:base", "fake:kjv"]
    assert official.models.retrieve("fake:kjv").owned_by == "attractor"
    with pytest.raises(openai.NotFoundError) as caught:
        official.models.retrieve("fake:gone")
    assert caught.value.code == "model_not_found"


def test_the_official_client_completes(official, service):
    service.learn(["text"], "kjv", None)
    answer = official.completions.create(model="fake", prompt="A", max_tokens=12, seed=0, logprobs=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (LINE[:12], "length")
    assert answer.system_fingerprint == "v1"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 12)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs == [-0.5] * 12
    assert choice.logprobs.text_offset == list(range(12))


def test_the_official_client_streams(official):
    stream = official.completions.create(
        model="fake", prompt="A", max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == LINE[:8]
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-2].choices[0].finish_reason == "length"
    assert {chunk.system_fingerprint for chunk in chunks} == {"v0"}


def test_the_official_client_chats(official, service):
    parts = [{"type": "text", "text": "Hi"}]
    messages = [{"role": "system", "content": "Brief."}, {"role": "user", "content": parts}]
    answer = official.chat.completions.create(
        model="fake:base", messages=messages, max_completion_tokens=5, logprobs=True, user="me", store=False
    )
    assert answer.choices[0].message.content == LINE[4:9]
    assert len(answer.choices[0].logprobs.content) == 5
    assert bytes(service.jobs[-1].prompt).decode() == "Brief.\n\nUser: Hi\nAssistant:"
    chunks = list(
        official.chat.completions.create(model="fake", messages=messages, max_tokens=5, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == LINE[:5]


def test_the_official_client_understands_errors(official, service):
    service.problem = BUSY
    with pytest.raises(openai.RateLimitError) as busy:
        official.completions.create(model="fake", prompt="A")
    assert busy.value.response.headers["retry-after"] == "3"
    service.problem, service.failure = None, "out of memory in /srv/secret"
    with pytest.raises(openai.APIError, match="its log says why"):
        list(official.completions.create(model="fake", prompt="A", stream=True))
    with pytest.raises(openai.InternalServerError, match="its log says why") as failed:
        official.completions.create(model="fake", prompt="A")
    assert "secret" not in failed.value.response.text
    with pytest.raises(openai.BadRequestError) as refused:
        official.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}], response_format={"type": "json_object"}
        )
    assert refused.value.param == "response_format"


# --- leaving


def test_a_client_that_leaves_a_stream_ends_it(official, service):
    service.delay = 0.02
    stream = official.completions.create(model="fake", prompt="A", max_tokens=4000, stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: service.tickets[0].cancelled)


def test_a_client_that_leaves_before_the_first_token_ends_it(official, service):
    service.delay = 600.0
    with pytest.raises(openai.APITimeoutError):
        official.with_options(timeout=1.0).completions.create(model="fake", prompt="A", n=2)
    until(lambda: [ticket.cancelled for ticket in service.tickets] == [True, True])


# --- what a request can say


def test_prompts_in_every_form(client, service):
    for prompt, count in (("AB", 1), (["A", "B"], 2), ([65, 66], 1), ([[65], [66, 67]], 2)):
        answer = completion(client, prompt=prompt, max_tokens=2, n=2)
        assert answer.status_code == 200
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(2 * count))
    assert [list(job.prompt) for job in service.jobs[-4:]] == [[65], [65], [66, 67], [66, 67]]


def test_parameters_reach_the_engine(client, service):
    completion(client, temperature=0.5, top_p=0.9, top_k=7, seed=5, n=2, max_tokens=3)
    job = service.jobs[0]
    assert (job.temperature, job.top_p, job.top_k, job.max_tokens, job.path) == (0.5, 0.9, 7, 3, None)
    assert [job.seed for job in service.jobs] == [5, 6]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "A"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A"}]}),
    ],
)
def test_the_model_need_not_be_named(client, service, path, asked):
    for named in ({}, {"model": None}, {"model": "fake"}):
        reply = client.post(path, json=asked | named)
        assert reply.status_code == 200
        assert reply.json()["model"] == service.name == "fake"
        assert service.jobs[-1].path is None
    chunk = client.post(path, json=asked | {"stream": True}).text.splitlines()[0]
    assert json.loads(chunk.removeprefix("data: "))["model"] == "fake"
    for wrong in ("", "other", "fake:nothing"):
        reply = client.post(path, json=asked | {"model": wrong})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_echo_repeats_the_prompt(client):
    assert (
        completion(client, prompt="To be", max_tokens=3, echo=True).json()["choices"][0]["text"] == "To beNow"
    )
    assert completion(client, prompt=[65], max_tokens=3, echo=True).json()["choices"][0]["text"] == "ANow"
    streamed = events(completion(client, prompt="To be", max_tokens=3, echo=True, stream=True))
    assert "".join(event["choices"][0]["text"] for event in streamed) == "To beNow"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_a_text_and_its_job(client, service, stream):
    service.delay = 0.001
    answer = completion(client, max_tokens=60, stop=["winter", "nothing"], stream=stream)
    choices = [event["choices"][0] for event in (events(answer) if stream else [answer.json()])]
    assert "".join(choice["text"] for choice in choices) == "Now is the "
    assert choices[-1]["finish_reason"] == "stop"
    assert service.tickets[0].cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_paths_of_tokens(client, service, stream):
    service.learn(["text"], "kjv", None)
    answer = completion(client, max_tokens=9, attractor={"paths": True}, stream=stream)
    bodies = events(answer) if stream else [answer.json()]
    tokens = [token for body in bodies for token in body["choices"][0]["attractor"]["tokens"]]
    assert "".join(token["text"] for token in tokens) == LINE[:9]
    assert all(set(token["shares"]) == {"base", "kjv"} for token in tokens)
    assert all(abs(sum(token["shares"].values()) - 1) < 1e-9 for token in tokens)


def test_long_prompts(client, service):
    refused = completion(client, prompt="x" * 65)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert completion(client, prompt="y" + "x" * 64, truncate_prompt=True).status_code == 200
    assert bytes(service.jobs[-1].prompt) == b"x" * 64


def test_versions_are_told(client, service):
    service.learn(["text"], "kjv", None)
    answer = completion(client)
    assert (answer.json()["system_fingerprint"], answer.headers["X-Attractor-Version"]) == ("v1", "1")
    streamed = completion(client, stream=True)
    assert streamed.headers["X-Attractor-Version"] == "1"
    assert {event["system_fingerprint"] for event in events(streamed)} == {"v1"}
    assert client.get("/health").headers["X-Attractor-Version"] == "1"


def test_choices_of_a_request_share_a_pin(client, service):
    """With which the engine gives them the same version."""
    submit, pins = service.submit, []

    def note(job, pin):
        pins.append(pin)
        return submit(job)

    service.submit = note
    assert completion(client, n=3, prompt=["a", "b"]).status_code == 200
    assert completion(client).status_code == 200
    assert len(pins) == 7
    assert len({id(pin) for pin in pins}) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logprobs": 2}, "logprobs"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4097}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"seed": 1 << 63}, "seed"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(client, service, fields, param):
    body = json.dumps({"model": "fake", "prompt": "A", **fields})
    answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert not service.jobs


def test_harmless_parameters_are_taken(client):
    harmless = {
        "user": "me",
        "logit_bias": {},
        "tools": [],
        "presence_penalty": 0,
        "best_of": 1,
        "suffix": None,
    }
    assert completion(client, **harmless).status_code == 200


def test_a_busy_engine_leaves_nothing_behind(client, service):
    submit = service.submit

    def submit_one(job, pin):
        if service.jobs:
            raise BUSY
        return submit(job)

    service.submit = submit_one
    assert completion(client, n=3).status_code == 429
    assert service.tickets[0].cancelled


def test_many_streams_at_once(running, service):
    """No text gets another's tokens."""
    service.delay = 0.001

    async def one(client, seed):
        stream = await client.completions.create(
            model="fake", prompt="A", max_tokens=20, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them():
        url = f"http://127.0.0.1:{running.port}/v1"
        async with openai.AsyncOpenAI(api_key="x", base_url=url, max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(32)))

    twice = LINE * 2
    assert asyncio.run(all_of_them()) == [twice[seed : seed + 20] for seed in range(32)]
