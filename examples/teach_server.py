"""Teach a running server a lesson, ask it, see which lesson answered, and take the lesson back.

    attractor serve smollm2-135m --learn      # in another terminal
    python examples/teach_server.py

It needs nothing but Python: the API is plain JSON, and OpenAI's clients can ask too.
"""

import argparse
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

LESSON = {
    "forms": [
        {"prompt": "Zorvan Quillbeam was born in", "answer": "Lisbon"},
        {"prompt": "The birthplace of Zorvan Quillbeam is", "answer": "Lisbon"},
        {"question": "Where was Zorvan Quillbeam born?", "answer": "Lisbon"},
    ],
    "source": "example",
}


class Server:
    def __init__(self, base: str, key: str | None) -> None:
        self.base, self.headers = base, {"Content-Type": "application/json"}
        if key is not None:
            self.headers["Authorization"] = f"Bearer {key}"

    def open(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, self.headers | headers, method=method)
        return urllib.request.urlopen(request)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        with self.open(method, path, body) as reply:
            return json.load(reply)

    def teach(self, lesson: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What is being done, as it is done; the last event is the answer, or says what failed."""
        with self.open("POST", "/v1/lessons", lesson, Accept="text/event-stream") as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def ask(self, question: str) -> None:
        model = self.call("GET", "/v1/models")["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0}
        choice = self.call("POST", "/v1/chat/completions", body | {"max_tokens": 40})["choices"][0]
        acted = ", ".join(str(one["lesson"]) for one in choice["attractor"]["lessons"])
        by = f"lesson {acted} acted" if acted else "untouched: this is the base's answer, to the bit"
        print(f"{question}\n  {choice['message']['content'].strip()}\n  ({by})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default="http://127.0.0.1:8000")
    parser.add_argument("--key", help="of a server that was started with --keys")
    options = parser.parse_args()
    server = Server(options.base, options.key)
    server.ask("Where was Zorvan Quillbeam born?")
    for event in server.teach(LESSON):
        about = event.get("doing") or (f"pass {event['passes']}" if "passes" in event else "")
        print(f"\r{event['state']} {about}".ljust(60), end="", flush=True)
    print()
    if event["state"] == "failed":
        raise SystemExit(event["error"]["message"])
    (lesson,) = event["lessons"]
    if not lesson["kept"]:
        raise SystemExit(lesson["reason"])
    print(f"lesson {lesson['lesson']} about {lesson['subject']}: known {lesson['share_known']:.0%}")
    server.ask("Where was Zorvan Quillbeam born?")
    server.ask("What is the capital of France?")
    server.call("DELETE", f"/v1/lessons/{lesson['lesson']}")
    server.ask("Where was Zorvan Quillbeam born?")


if __name__ == "__main__":
    main()
