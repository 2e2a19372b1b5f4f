"""OpenAI's completions and chat completions: validation of requests, and the format of responses.

Unknown parameters are refused, as OpenAI does. Parameters of OpenAI's that this server does not implement are refused
unless their value changes nothing.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StrictBool, Tag, model_validator

from sympow.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, beginning_of, ends_of
from sympow.generation.sampling import Sampling
from sympow.generation.text import REPLACEMENT, TextDecoder
from sympow.serving.engine.completion import Event, Result, TokenLogprob, Usage
from sympow.serving.engine.engine import MAX_LOGPROBS

# Limits of a request that do not depend on the server's options.
MOST_CHOICES = 128
MOST_PROMPTS = 2_048
MOST_STOPS = 16
LONGEST_STOP = 1_000
# OpenAI's default for completions. OpenAI has no default for chats, but this server needs one.
DEFAULT_MAX_TOKENS = 16
DEFAULT_CHAT_TOKENS = 1_024
SEED_RANGE = 2**63
# Replaces −∞, which JSON cannot express, as OpenAI does.
LEAST_LOGPROB = -9999.0

Prompt = str | list[int]


def _prompts(value: Any) -> Any:
    """Validates prompts by hand: pydantic reports an error for every member of a union."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(x, str) or _is_ids(x) for x in value):
        if len(value) > MOST_PROMPTS:
            raise ValueError(f"must be at most {MOST_PROMPTS:,} prompts, got {len(value):,}")
        return value
    raise ValueError("must be a text, a list of token ids, or a list of texts or of lists of token ids")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _texts(value: Any) -> Any:
    """One stop string or several, as a list."""
    if isinstance(value, list) and len(value) > MOST_STOPS:
        raise ValueError(f"must be at most {MOST_STOPS} strings, got {len(value):,}")
    return [value] if isinstance(value, str) else [] if value is None else value


def _part_type(value: Any) -> Any:
    if value != "text":
        got = repr(value[:50]) if isinstance(value, str) else type(value).__name__
        raise ValueError(f"must be 'text', since this server takes only text; got {got}")
    return value


Prompts = Annotated[list[Annotated[str, Field(strict=True)] | list[int]], BeforeValidator(_prompts)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
    BeforeValidator(_texts),
    Field(max_length=MOST_STOPS),
]


def _only(*values: Any, why: str) -> BeforeValidator:
    """Refuses all values of a field that this server does not implement but those that change nothing, and null."""

    def check(value: Any) -> Any:
        # A number equal to a bool is not neutral: its type is wrong.
        if value is None or any(value == one and type(value) is type(one) for one in values):
            return value
        raise ValueError(f"must be {' or '.join(map(json.dumps, (*values, None)))}: {why}")

    return BeforeValidator(check)


NO_TOOLS = "this server does not call tools"
NOT_THERE = "this server does not have it"


class StreamOptions(BaseModel):
    """The options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    # Padding against traffic analysis, which this server does not add.
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(BaseModel):
    """The fields that completions and chats share.

    The fields from `top_k` on are this server's own; OpenAI's client sends them with `extra_body`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: Stops = []
    seed: int | None = Field(None, ge=-SEED_RANGE, lt=SEED_RANGE)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Accepted and ignored, since they do not change the response.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Not implemented: only values that change nothing are accepted.
    service_tier: Annotated[Any, _only("auto", "default", why="this server has one tier")] = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    context: str | None = None

    @model_validator(mode="after")
    def _check_what_is_not_there(self) -> GenerationRequest:
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(self, name):
                raise ValueError(f"{name} must be 0: this server has repetition_penalty instead")
        if self.logit_bias:
            raise ValueError("logit_bias must be empty: this server does not have it")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options must only be given with stream")
        return self

    def sampling(self) -> Sampling:
        """The given sampling settings; those not given leave the model's distribution unchanged."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if given.get("top_k") == -1:
            # What other servers call all tokens.
            del given["top_k"]
        return Sampling(**given)

    @property
    def limit_name(self) -> str:
        """The field that limits the number of tokens."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """A request for `/v1/completions`."""

    prompt: Prompts = [""]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_what_is_not_there_either(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must be n: this server returns every completion that it generates")
        if self.suffix:
            raise ValueError("suffix must be empty: the model continues texts and does not fill gaps")
        return self


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Annotated[Literal["text"], BeforeValidator(_part_type)]
    text: str


def _content_kind(value: Any) -> str | None:
    """The tag of a message's content. Without tags, pydantic reports an error for every member of the union."""
    return "Text" if isinstance(value, str) else "Parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("Text")] | Annotated[list[TextPart], Tag("Parts")],
    Discriminator(
        _content_kind, custom_error_type="content", custom_error_message="must be a text, or a list of text parts"
    ),
]


class Message(BaseModel):
    """A message of a chat.

    The fields from `refusal` on must be empty, as in responses, whose messages clients send back.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content | None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[Any, _only([], why=NO_TOOLS)] = None
    annotations: Annotated[Any, _only([], why=NOT_THERE)] = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("content must be a text, or a list of text parts; only that of an assistant may be null")
        return self

    def for_template(self) -> dict[str, str]:
        """The message as a dict, as chat templates expect it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class TextFormat(BaseModel):
    """The only supported `response_format`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """A request for `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: StrictBool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: TextFormat | None = None
    modalities: Annotated[Any, _only(["text"], why="the model writes text alone")] = None
    tools: Annotated[Any, _only([], why=NO_TOOLS)] = None
    tool_choice: Annotated[Any, _only("none", "auto", why=NO_TOOLS)] = None
    parallel_tool_calls: Annotated[Any, _only(True, False, why=NO_TOOLS)] = None
    functions: Annotated[Any, _only([], why=NO_TOOLS)] = None
    function_call: Annotated[Any, _only("none", "auto", why=NO_TOOLS)] = None
    store: Annotated[Any, _only(False, why="this server stores no answers")] = None
    audio: Annotated[Any, _only(why=NOT_THERE)] = None
    prediction: Annotated[Any, _only(why=NOT_THERE)] = None
    reasoning_effort: Annotated[Any, _only(why=NOT_THERE)] = None
    verbosity: Annotated[Any, _only(why=NOT_THERE)] = None
    web_search_options: Annotated[Any, _only(why=NOT_THERE)] = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs must only be given with logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens must not both be given")
        return self

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


@dataclass(frozen=True)
class Job:
    """The arguments of `Engine.submit` for one choice of a response."""

    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    seed: int | None
    logprobs: int | None
    echo: bool
    ignore_boundary: bool

    def options(self) -> dict[str, Any]:
        """Arguments of `submit` by name."""
        names = ("max_tokens", "stop", "seed", "logprobs", "echo", "ignore_boundary")
        return {name: getattr(self, name) for name in names}


def completion_jobs(request: CompletionRequest) -> list[Job]:
    """One job per choice of the response, ordered by prompt."""
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return _jobs(request, request.prompt, max_tokens, request.logprobs, bool(request.echo))


def chat_jobs(request: ChatRequest, prompt: str) -> list[Job]:
    """One job per choice of the response.

    Args:
        prompt: the messages as the chat template writes them.
    """
    given = request.max_tokens if request.max_tokens is not None else request.max_completion_tokens
    max_tokens = DEFAULT_CHAT_TOKENS if given is None else given
    return _jobs(request, [prompt], max_tokens, (request.top_logprobs or 0) if request.logprobs else None, echo=False)


def _jobs(
    request: GenerationRequest, prompts: Sequence[Prompt], max_tokens: int, logprobs: int | None, echo: bool
) -> list[Job]:
    sampling = request.sampling()

    def seed_of(choice: int) -> int | None:
        # Choices of one prompt have different seeds; each of several prompts gets the seeds that it would get alone.
        if request.seed is None:
            return None
        seed = request.seed + choice
        return seed if seed < SEED_RANGE else seed - SEED_RANGE

    return [
        Job(
            prompt=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=tuple(request.stop),
            seed=seed_of(choice),
            logprobs=logprobs,
            echo=echo,
            ignore_boundary=bool(request.ignore_eos),
        )
        for prompt in prompts
        for choice in range(request.n or 1)
    ]


class TokenNames:
    """Names of tokens in log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._boundary_name = getattr(tokenizer, "boundary_token", END_OF_TEXT)

    def name(self, token: int) -> str:
        """A token's text; "token_id:N" if it is not made of whole characters."""
        if token == self._tokenizer.boundary:
            return self._boundary_name
        text = getattr(self._tokenizer, "decode_continuation", self._tokenizer.decode)([token])
        return f"token_id:{token}" if not text or REPLACEMENT in text else text

    def utf8(self, token: int) -> list[int] | None:
        """A token's UTF-8 bytes; None if they are not known."""
        if isinstance(self._tokenizer, ByteTokenizer) and token != self._tokenizer.boundary:
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

    def offsets(self, *, continues: bool) -> TokenOffsets:
        return TokenOffsets(self._tokenizer, continues)


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


Form = Literal["completion", "chat"]


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
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        kind = "chat.completion" if self._chat else "text_completion"
        usages = [result.usage for result in results]
        return {**self._head(kind), "choices": choices, "usage": self.usage(usages)}

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
        if not self._chat:
            return None
        return self._chunk([self._delta(index, {"role": "assistant", "content": ""}, None, None)])

    def chunk(self, index: int, event: Event) -> dict[str, Any] | None:
        """The chunk for an event of a choice; None if it has nothing for the client."""
        logprobs = None if event.logprobs is None else self._logprobs(index, event.logprobs)
        if not event.text and logprobs is None and event.finish_reason is None:
            return None
        if self._chat:
            delta = {"content": event.text} if event.text else {}
            return self._chunk([self._delta(index, delta, logprobs, event.finish_reason)])
        choice = {"index": index, "text": event.text, "logprobs": logprobs, "finish_reason": event.finish_reason}
        return self._chunk([choice])

    def closing(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """The last chunk, with the usage."""
        return self._chunk([]) | {"usage": self.usage(usages)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk" if self._chat else "text_completion"), "choices": choices}

    def _delta(self, index: int, delta: dict[str, str], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        # If no token was generated, there are only the log-probabilities of the prompt.
        known = [entries for entries in (result.prompt_logprobs, result.logprobs) if entries is not None]
        logprobs = self._logprobs(index, [entry for entries in known for entry in entries]) if known else None
        choice = {"index": index, "logprobs": logprobs, "finish_reason": result.finish_reason}
        if self._chat:
            return {**choice, "message": {"role": "assistant", "content": result.text, "refusal": None}}
        return {**choice, "text": result.text}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._chat:
            return {"content": [self._chat_logprob(entry) for entry in entries], "refusal": None}
        # The first token of a text alone has no log-probability.
        continues = not entries or entries[0].logprob is not None
        offsets = self._offsets.setdefault(index, self._names.offsets(continues=continues))
        tops = [self._names.names(entry.top) if entry.logprob is not None else None for entry in entries]
        return {
            "tokens": [self._names.name(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": tops if self._tops else None,
            "text_offset": [offsets.take(entry.token) for entry in entries],
        }

    def _chat_logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        named = [self._named(token, logprob) for token, logprob in entry.top]
        return {**self._named(entry.token, entry.logprob), "top_logprobs": named}

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._names.name(token), "logprob": _finite(logprob), "bytes": self._names.utf8(token)}


def _finite(logprob: float | None) -> float | None:
    """A log-probability as JSON can express it: NaN, from a model with NaN parameters, becomes null."""
    return None if logprob is None or math.isnan(logprob) else max(logprob, LEAST_LOGPROB)
