"""`Answer`: the format of responses to completions and chats, OpenAI's."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from sympow.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, beginning_of, ends_of
from sympow.generation.text import REPLACEMENT, TextDecoder
from sympow.serving.engine.completion import Event, Result, TokenLogprob, Usage
from sympow.serving.web.bodies import Form

# Replaces −∞, which JSON cannot express, as OpenAI does.
LEAST_LOGPROB = -9999.0


class TokenNames:
    """Names of tokens in log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._boundary_name = getattr(tokenizer, "boundary_token", END_OF_TEXT)

    def name(self, token: int) -> str:
        """A token's text; "token_id:N" if it is not made of whole characters."""
        if token == self.tokenizer.boundary:
            return self._boundary_name
        text = getattr(self.tokenizer, "decode_continuation", self.tokenizer.decode)([token])
        return f"token_id:{token}" if not text or REPLACEMENT in text else text

    def utf8(self, token: int) -> list[int] | None:
        """A token's UTF-8 bytes; None if they are not known."""
        if isinstance(self.tokenizer, ByteTokenizer) and token != self.tokenizer.boundary:
            return [token]
        name = self.name(token)
        return None if name == f"token_id:{token}" else list(name.encode())

    def names(self, top: Iterable[tuple[int, float]]) -> dict[str, float | None]:
        """Log-probabilities by token name; a token with the same name as one before is named by its id."""
        named: dict[str, float | None] = {}
        for token, logprob in top:
            name = self.name(token)
            named[f"token_id:{token}" if name in named else name] = _finite(logprob)
        return named


class TokenOffsets:
    """The offset of each token in the text, in characters.

    Args:
        continues: whether the tokens continue a text, and are not its beginning.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool) -> None:
        self._decoder, self._place = TextDecoder(tokenizer, continues=continues), 0
        # These have no text, and would end the decoder.
        self._without_text = ends_of(tokenizer).union(beginning_of(tokenizer))

    def take(self, token: int) -> int:
        """The offset of the next token."""
        place = self._place
        if token not in self._without_text:
            self._place += sum(map(len, self._decoder.take(token)))
        return place


class Answer:
    """Formats a response, as a whole or as the chunks of a stream.

    Args:
        form: whether the request is a completion or a chat.
        model: name of the model.
        names: names of tokens.
        context_tokens: number of tokens of the context that the request named; None without a context.
        tops: whether log-probabilities of the most likely tokens were asked for, too.
        choices: number of choices per prompt; they are adjacent.
    """

    def __init__(
        self, form: Form, model: str, names: TokenNames, context_tokens: int | None, tops: bool, choices: int
    ) -> None:
        self.id = f"{'chatcmpl' if form == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
        self._chat, self._model, self._names = form == "chat", model, names
        self._context_tokens, self._tops, self._choices = context_tokens, tops, choices
        self._created = int(time.time())
        self._offsets: dict[int, TokenOffsets] = {}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        choices = [self._whole_choice(index, result) for index, result in enumerate(results)]
        usages = [result.usage for result in results]
        return self._response("chat.completion", choices) | {"usage": self.usage(usages)}

    def usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """The usage of all choices; each prompt counts once, and the tokens of a context are counted separately.

        Args:
            usages: usages of the choices, in order.
        """
        prompts = usages[:: self._choices]
        prompt, completion = sum(u.prompt_tokens for u in prompts), sum(u.completion_tokens for u in usages)
        told: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        }
        return told if self._context_tokens is None else told | {"context_tokens": self._context_tokens}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice of a chat; None for completions."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([_choice(index, {"delta": delta}, None, None)]) if self._chat else None

    def chunk(self, index: int, event: Event) -> dict[str, Any] | None:
        """The chunk for an event of a choice; None if it has nothing for the client."""
        logprobs = None if event.logprobs is None else self._logprobs(index, event.logprobs)
        if not event.text and logprobs is None and event.finish_reason is None:
            return None
        content: dict[str, Any] = {"text": event.text}
        if self._chat:
            content = {"delta": {"content": event.text} if event.text else {}}
        return self._chunk([_choice(index, content, logprobs, event.finish_reason)])

    def closing(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """The last chunk, with the usage."""
        return self._chunk([]) | {"usage": self.usage(usages)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._response("chat.completion.chunk", choices)

    def _response(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A response, or a chunk of it; `kind` of those of chats."""
        kind = kind if self._chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _whole_choice(self, index: int, result: Result) -> dict[str, Any]:
        # If no token was generated, there are only the log-probabilities of the prompt.
        known = [entries for entries in (result.prompt_logprobs, result.logprobs) if entries is not None]
        logprobs = self._logprobs(index, [entry for entries in known for entry in entries]) if known else None
        content: dict[str, Any] = {"text": result.text}
        if self._chat:
            content = {"message": {"role": "assistant", "content": result.text, "refusal": None}}
        return _choice(index, content, logprobs, result.finish_reason)

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._chat:
            content = [
                self._named(entry.token, entry.logprob) | {"top_logprobs": [self._named(*pair) for pair in entry.top]}
                for entry in entries
            ]
            return {"content": content, "refusal": None}
        if index not in self._offsets:
            # The first token of a text alone has no log-probability.
            continues = not entries or entries[0].logprob is not None
            self._offsets[index] = TokenOffsets(self._names.tokenizer, continues)
        offsets = self._offsets[index]
        tops = [self._names.names(entry.top) if entry.logprob is not None else None for entry in entries]
        return {
            "tokens": [self._names.name(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": tops if self._tops else None,
            "text_offset": [offsets.take(entry.token) for entry in entries],
        }

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._names.name(token), "logprob": _finite(logprob), "bytes": self._names.utf8(token)}


def _choice(index: int, content: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _finite(logprob: float | None) -> float | None:
    """A log-probability as JSON can express it: NaN, from a model with NaN parameters, becomes null."""
    return None if logprob is None or math.isnan(logprob) else max(logprob, LEAST_LOGPROB)
