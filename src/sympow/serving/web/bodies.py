"""The bodies of requests for completions and chats, as pydantic validates them for FastAPI.

Unknown parameters are refused, as OpenAI does. Parameters of OpenAI's that this server does not implement are refused
unless their value changes nothing.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StrictBool, Tag, model_validator

from sympow.errors import ArgumentError, UserError
from sympow.generation.sampling import Sampling
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

Form = Literal["completion", "chat"]
Prompt = str | list[int]


def _prompts(value: Any) -> Any:
    """Validates prompts by hand: pydantic reports an error for every member of a union."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(x, str) or _is_ids(x) for x in value):
        if len(value) > MOST_PROMPTS:
            raise UserError(f"must be at most {MOST_PROMPTS:,} prompts, got {len(value):,}")
        return value
    raise UserError("must be a text, a list of token ids, or a list of texts or of lists of token ids")


def _is_ids(value: Any) -> bool:
    # Not a loop in Python: there may be millions, and bodies are validated in the event loop.
    return isinstance(value, list) and set(map(type, value)) == {int}


def _texts(value: Any) -> Any:
    """One stop string or several, as a list."""
    if isinstance(value, list) and len(value) > MOST_STOPS:
        raise UserError(f"must be at most {MOST_STOPS} strings, got {len(value):,}")
    return [value] if isinstance(value, str) else [] if value is None else value


def _part_type(value: Any) -> Any:
    if value != "text":
        got = repr(value[:50]) if isinstance(value, str) else type(value).__name__
        raise UserError(f"must be 'text', since this server takes only text; got {got}")
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
        raise UserError(f"must be {' or '.join(map(json.dumps, (*values, None)))}: {why}")

    return BeforeValidator(check)


NO_TOOLS = "this server does not call tools"
NOT_THERE = "this server does not have it"


class StrictModel(BaseModel):
    """A part of a body: unknown fields are refused, and values of other types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(StrictModel):
    """The options of a stream."""

    include_usage: bool = False
    # Padding against traffic analysis, which this server does not add.
    include_obfuscation: Literal[False] | None = None


class GenerationBody(StrictModel):
    """The fields that completions and chats share.

    The fields from `top_k` on are this server's own; OpenAI's client sends them with `extra_body`.
    """

    model_config = ConfigDict(allow_inf_nan=False, protected_namespaces=())

    # Of the response.
    form: ClassVar[Form]

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
    def _check_what_is_not_there(self) -> GenerationBody:
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(self, name):
                raise ArgumentError(name, "must be 0: this server has repetition_penalty instead")
        if self.logit_bias:
            raise ArgumentError("logit_bias", "must be empty: this server does not have it")
        if self.stream_options is not None and not self.stream:
            raise ArgumentError("stream_options", "must only be given with stream")
        return self

    def options(self) -> dict[str, Any]:
        """Arguments of `Engine.request` besides the prompt, its prefix and the seed.

        Sampling settings that are not given leave the model's distribution unchanged.

        Raises:
            ValueError: a sampling setting is out of its range; the message names it.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if given.get("top_k") == -1:
            # What other servers call all tokens.
            del given["top_k"]
        return {"sampling": Sampling(**given), "stop": self.stop, "ignore_boundary": bool(self.ignore_eos)}

    def seeds(self) -> list[int | None]:
        """The seed of each choice of a prompt: each of several prompts gets the seeds that it would get alone."""
        if self.seed is None:
            return [None] * (self.n or 1)
        seeds = range(self.seed, self.seed + (self.n or 1))
        return [seed if seed < SEED_RANGE else seed - SEED_RANGE for seed in seeds]

    @property
    def limit_name(self) -> str:
        """The field that limits the number of tokens."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    form = "completion"

    prompt: Prompts = [""]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_what_is_not_there_either(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ArgumentError("best_of", "must be n: this server returns every completion that it generates")
        if self.suffix:
            raise ArgumentError("suffix", "must be empty: the model continues texts and does not fill gaps")
        return self

    def options(self) -> dict[str, Any]:
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return super().options() | {"max_tokens": max_tokens, "logprobs": self.logprobs, "echo": bool(self.echo)}


class TextPart(StrictModel):
    """A part of a message's content."""

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


class Message(StrictModel):
    """A message of a chat.

    The fields from `refusal` on must be empty, as in responses, whose messages clients send back.
    """

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
            raise ArgumentError(
                "content", "must be a text, or a list of text parts; only that of an assistant may be null"
            )
        return self

    def for_template(self) -> dict[str, str]:
        """The message as a dict, as chat templates expect it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class TextFormat(StrictModel):
    """The only supported `response_format`."""

    type: Literal["text"]


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    form = "chat"

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
    def _check_together(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ArgumentError("top_logprobs", "must only be given with logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ArgumentError("max_tokens", "and max_completion_tokens must not both be given")
        return self

    def options(self) -> dict[str, Any]:
        given = self.max_tokens if self.max_tokens is not None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return super().options() | {
            "max_tokens": DEFAULT_CHAT_TOKENS if given is None else given,
            "logprobs": logprobs,
        }

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
