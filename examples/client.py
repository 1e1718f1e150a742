"""Ask a running server: with OpenAI's client, and with nothing but Python.

    attractor serve smollm2-135m              # in another terminal
    python examples/client.py "What is the capital of France?"

OpenAI's client is the package "openai"; without it only the second way is shown. examples/teach_server.py
also teaches the server.
"""

import argparse
import json
import urllib.request
from collections.abc import Iterator


def with_openai(base: str, key: str | None, question: str) -> Iterator[str]:
    """The words of the answer as they are written, by the client that everybody knows."""
    from openai import OpenAI

    with OpenAI(base_url=f"{base}/v1", api_key=key or "none is needed") as client:
        model = client.models.list().data[0].id
        for event in client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=30,
            stream=True,
        ):
            yield event.choices[0].delta.content or ""


def with_urllib(base: str, key: str | None, question: str) -> Iterator[str]:
    """The same with the standard library: the API is JSON, and a stream is lines that begin with `data:`."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 30,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{base}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                yield event["choices"][0]["delta"].get("content") or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--base", default="http://127.0.0.1:8000")
    parser.add_argument("--key", help="of a server that was started with --keys")
    options = parser.parse_args()
    for way in (with_openai, with_urllib):
        print(f"{way.__name__}: ", end="", flush=True)
        try:
            for words in way(options.base, options.key, options.question):
                print(words, end="", flush=True)
        except ImportError as error:
            print(f"left out ({error}): pip install openai", end="")
        print()


if __name__ == "__main__":
    main()
