"""How answers are written down: whole or in chunks, completions or chats."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from attractor.serve.decode.detokenize import Piece, Told
from attractor.serve.http.generation import Batch, Choice
from attractor.serve.http.schemas import ChatForm, CompletionForm, Generation


class Shape:
    """How an answer is written down."""

    kind: str
    prefix: str
    chunk_kind: str

    def __init__(self, form: Generation) -> None:
        self.form = form
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._opened: set[int] = set()
        self.wants_usage = form.stream_options is not None and form.stream_options.include_usage

    def frame(self, versions: Sequence[int], choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.chunk_kind if chunk else self.kind,
            "created": self.created,
            "model": self.form.model,
            "system_fingerprint": ",".join(f"v{version}" for version in versions),
            "choices": choices,
        }

    def whole(self, batch: Batch) -> dict[str, Any]:
        choices = [self.choice(choice) | self.extension(choice, choice.tokens) for choice in batch.choices]
        return self.frame(batch.versions, choices, chunk=False) | {"usage": batch.usage}

    def chunks(self, choice: Choice, piece: Piece | None) -> list[dict[str, Any]]:
        opening = None if choice.index in self._opened else self.opening(choice)
        self._opened.add(choice.index)
        worth_it = piece is None or piece.text or piece.tokens
        return ([] if opening is None else [opening]) + ([self.chunk(choice, piece)] if worth_it else [])

    def chunk(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        part = self.part(choice, piece) | self.extension(choice, [] if piece is None else piece.tokens)
        return self.frame([choice.version], [part], chunk=True)

    def extension(self, choice: Choice, tokens: Sequence[Told]) -> dict[str, Any]:
        told: dict[str, Any] = {"version": choice.version}
        if self.form.attractor.paths:
            told["tokens"] = [{"text": each.text, "shares": each.written.shares} for each in tokens]
        return {"attractor": told}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """What goes before the first chunk of a choice."""
        raise NotImplementedError

    def choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def part(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        raise NotImplementedError


class CompletionShape(Shape):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    form: CompletionForm

    def _part(
        self, index: int, text: str, reason: str | None, tokens: Sequence[Told], start: int = 0
    ) -> dict[str, Any]:
        logprobs = None
        if self.form.logprobs is not None:
            offsets, at = [], start
            for each in tokens:
                offsets.append(at)
                at += len(each.text)
            logprobs = {
                "tokens": [each.text for each in tokens],
                "token_logprobs": [each.written.logprob for each in tokens],
                "top_logprobs": None,
                "text_offset": offsets,
            }
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        if not self.form.echo:
            return None
        part = self._part(choice.index, choice.prompt.text or "", None, [])
        return self.frame([choice.version], [part], chunk=True)

    def choice(self, choice: Choice) -> dict[str, Any]:
        prompt = (choice.prompt.text or "") if self.form.echo else ""
        return self._part(choice.index, prompt + choice.text, choice.reason, choice.tokens)

    def part(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        if piece is None:
            return self._part(choice.index, "", choice.reason, [])
        before = len(choice.text) - sum(len(each.text) for each in piece.tokens)
        return self._part(choice.index, piece.text, None, piece.tokens, max(0, before))


class ChatShape(Shape):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"
    form: ChatForm

    def _logprobs(self, tokens: Sequence[Told]) -> dict[str, Any] | None:
        if not self.form.logprobs:
            return None
        content = [
            {
                "token": each.text,
                "logprob": each.written.logprob,
                "bytes": list(each.text.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for each in tokens
        ]
        return {"content": content, "refusal": None}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        part = {"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None}
        return self.frame([choice.version], [part], chunk=True)

    def choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {
            "index": choice.index, "message": message, "finish_reason": choice.reason,
            "logprobs": self._logprobs(choice.tokens),
        }  # fmt: skip

    def part(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        if piece is None:
            return {"index": choice.index, "delta": {}, "finish_reason": choice.reason, "logprobs": None}
        return {
            "index": choice.index, "delta": {"content": piece.text}, "finish_reason": None,
            "logprobs": self._logprobs(piece.tokens),
        }  # fmt: skip
