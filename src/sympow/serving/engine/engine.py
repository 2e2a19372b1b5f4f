"""`Engine`: continuous batching. Requests of any lengths and settings share the steps of one batch of fixed size.

    engine = Engine(TextModel.load("runs/first/model", "cuda"), slots=64)
    completion = engine.submit("def fib(", Sampling(temperature=0), max_tokens=100)    # returns at once
    for event in completion:                                                           # or: async for
        print(event.text, end="")
    print(completion.result().usage)
    engine.close()

A worker thread owns the model. Between two decoding steps, finished requests leave their slots, waiting requests take
free slots, and at most `segment_size` prompt tokens are prefilled, so that a running request waits for at most one
segment between two tokens. Prompts and contexts longer than a segment take turns, four at a time, and each of the four
holds a state beside those of the slots; further ones wait until one of the four is finished. Shorter prompts need no
such state and do not wait for them. With symmetric powers a slot has a fixed size, however many tokens its request has
(`sympow.Window` with `put` and `take`).

The output of a request does not depend on other requests. Its samples come from its own generator, seeded as in
`sympow.generation.generate`. Matrix products always have the same number of rows (`step_rows`), so not even rounding
depends on the other requests in the batch. The exception is a prompt that starts from a state which the prefix cache
took at the end of another prompt: it is rounded differently.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

from sympow.checks import check_at_least, check_at_most, check_seed
from sympow.data.pieces import PIECE, pieces
from sympow.data.plain_text import check_text
from sympow.data.tokenizer import beginning_of, encode_continuation, ends_of
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling
from sympow.generation.text import TextDecoder, TextModel, stop_strings
from sympow.ops.window_batch import CAPACITY
from sympow.serving.engine.completion import Completion, Prefilling
from sympow.serving.engine.prefill_graphs import PrefillGraphs, StateBuffer, unsupported_reason
from sympow.serving.engine.prefix_cache import TOKEN_TYPE, PrefixCache
from sympow.serving.engine.request import ContextPrefill, Request
from sympow.serving.engine.row_sampling import RowSampler
from sympow.serving.engine.scheduler import Scheduler
from sympow.serving.engine.slots import Slots
from sympow.serving.engine.stats import EngineStats

# The largest `logprobs` of a request.
MAX_LOGPROBS = 20
# Defaults of `segment_size`: such a segment takes some milliseconds on an H200 with the 124M model, and a second on two
# CPU cores.
GPU_SEGMENT_SIZE, CPU_SEGMENT_SIZE = 2_048, 256
# Default of `step_rows` on a CPU: matrix products with so few rows are still bound by memory and not by arithmetic.
CPU_STEP_ROWS = 16


class Engine:
    """Continuous batching of requests. All methods may be called from any thread.

    Args:
        text_model: a model and its tokenizer, on the device to decode on. The model must not be changed while the
            engine is open.
        slots: how many requests are decoded at once; memory is allocated for all slots.
        segment_size: prompt tokens to prefill between two steps; None: 2,048 on a GPU, 256 on a CPU.
        window: tokens in the window of a slot, which are folded into its state when the window is full.
        max_context: the most tokens of a slot, prompt and completion together; None: no limit. Softmax models need a
            limit, which determines the bytes of a slot.
        max_queue: how many requests may wait for a slot.
        prefix_cache_bytes: bytes of the prefix cache, from which prompts with a known prefix start; 0: no cache.
        step_rows: rows of every matrix product of a step, so that rounding does not depend on how many requests run.
            None: all slots on a GPU, where weights are read once for all rows; at most 16 on a CPU.
        graphs: whether to capture decoding steps and prefill segments as CUDA graphs, on a GPU. Segments of softmax
            models, with form="recurrent", and of models on several devices are launched eagerly in any case.
    """

    def __init__(
        self,
        text_model: TextModel,
        slots: int = 64,
        *,
        segment_size: int | None = None,
        window: int = CAPACITY,
        max_context: int | None = None,
        max_queue: int = 256,
        prefix_cache_bytes: int = 2**30,
        step_rows: int | None = None,
        graphs: bool = True,
    ) -> None:
        if not isinstance(text_model, TextModel):
            raise ArgumentTypeError("text_model", f"must be a TextModel, got {type(text_model).__name__}")
        model = text_model.model
        on_gpu = model.embedding.weight.is_cuda
        if segment_size is None:
            segment_size = GPU_SEGMENT_SIZE if on_gpu else CPU_SEGMENT_SIZE
        if step_rows is None:
            step_rows = slots if on_gpu else min(slots, CPU_STEP_ROWS)
        sizes = {"slots": slots, "segment_size": segment_size, "window": window, "max_queue": max_queue}
        sizes |= {"step_rows": step_rows, "max_context": 1 if max_context is None else max_context}
        for name, value in sizes.items():
            check_at_least(name, value, 1)
        check_at_least("prefix_cache_bytes", prefix_cache_bytes, 0)
        if step_rows > slots:
            raise ArgumentError("step_rows", f"must be at most the number of slots, {slots}; got {step_rows}")
        if max_context is None and model.config.mixer == "softmax":
            raise ArgumentError(
                "max_context", "must be given for a softmax model: a slot holds the keys and values of all its tokens"
            )
        if text_model.tokenizer.boundary >= model.config.vocab_size:
            raise UserError(
                f"text_model's tokenizer has the boundary token {text_model.tokenizer.boundary}, but the model has "
                f"{model.config.vocab_size} tokens"
            )
        self.text_model, self.slots, self.segment_size = text_model, slots, segment_size
        self._max_context = max_context
        buffer = StateBuffer(model) if graphs and unsupported_reason(model) is None else None
        batch = Slots(
            model,
            slots,
            window=window,
            max_context=max_context,
            step_rows=step_rows,
            graphs=graphs,
            buffer=buffer,
        )
        sampler = RowSampler(batch.logits, batch.seen, batch.tokens, top=MAX_LOGPROBS, graphs=graphs)
        prefill_graphs = None if buffer is None else PrefillGraphs(model, segment_size, buffer)
        self._scheduler = Scheduler(
            model,
            batch,
            sampler,
            PrefixCache(prefix_cache_bytes),
            prefill_graphs,
            rows=slots,
            segment_size=segment_size,
            max_queue=max_queue,
        )

    def request(
        self,
        prompt: str | Iterable[int],
        sampling: Sampling | None = None,
        *,
        max_tokens: int,
        stop: str | Iterable[str] = (),
        seed: int | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        prefix: Prefix | None = None,
        ignore_boundary: bool = False,
        check: Callable[[], None] | None = None,
    ) -> Request:
        """Checks a request and tokenizes its prompt, for `submit`.

        Args:
            prompt: a text, or token ids. A text gets the tokens that begin a text first (`beginning_of`), unless it
                continues a prefix; ids are used unchanged. Ids may be empty only with a prefix.
            sampling: settings of sampling; None: the model's own distribution.
            max_tokens: the most tokens to generate; 0: only prefill, for the log-probabilities of a prompt for example.
            stop: a string, or strings, that end the completion and are not part of it.
            seed: seed of the samples; None: a new one each time.
            logprobs: how many of the most likely tokens to report with each token's own log-probability, 0 to 20;
                None: no log-probabilities.
            echo: whether the first event is the prompt, with its log-probabilities if `logprobs` is given.
            prefix: the prefilled text before the prompt, one sequence of the same model; it is not modified.
            ignore_boundary: whether to continue after a boundary token, up to max_tokens.
            check: called before each of the `pieces` in which a long prompt is tokenized; what it raises ends this.

        Raises:
            EngineClosedError: the engine is closed.
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise ArgumentTypeError("sampling", f"must be a Sampling, got {type(sampling).__name__}")
        check_at_least("max_tokens", max_tokens, 0)
        if logprobs is not None:
            check_at_least("logprobs", logprobs, 0)
            check_at_most("logprobs", logprobs, MAX_LOGPROBS, "the most that are computed")
        if seed is not None:
            check_seed(seed)
        stop = stop_strings(stop)
        tokens = self._tokens("prompt", prompt, prefix, check)
        self._check_room("prompt", len(tokens), prefix, max_tokens)
        text = prompt if isinstance(prompt, str) else None
        if echo and text is None:
            text = self.text_model.tokenizer.decode(tokens.tolist())
        return Request(
            tokens,
            self.segment_size,
            prefix,
            scored=logprobs if echo else None,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            seed=seed,
            logprobs=logprobs,
            echo=text if echo else None,
            ends=ends_of(self.text_model.tokenizer),
            ignore_boundary=ignore_boundary,
        )

    def submit(
        self, prompt: str | Iterable[int] | Request, sampling: Sampling | None = None, **options: Any
    ) -> Completion:
        """Queues a request and returns at once.

        Args:
            prompt, sampling, options: as in `request`; or what it returned, alone.

        Raises:
            QueueFullError: all slots and the queue are full.
            EngineClosedError, ValueError, TypeError: as in `request`.
        """
        if not isinstance(prompt, Request):
            request = self.request(prompt, sampling, **options)
        elif sampling is not None or options:
            raise TypeError("a Request must be submitted without further arguments: it has its own")
        else:
            request = prompt
        if request.submitted:
            raise ArgumentError(
                "prompt", "is a Request that was submitted already: dataclasses.replace makes another one"
            )
        request.decoder = TextDecoder(self.text_model.tokenizer, request.stop)
        request.handle = Completion(request.tokens, self._scheduler.wake)
        try:
            self._scheduler.submit(request)
        except BaseException:
            # It may be submitted again, when there is room in the queue for example.
            del request.handle
            raise
        return request.handle

    def prefill(
        self,
        text: str | Sequence[int],
        *,
        prefix: Prefix | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Prefix:
        """Prefills a context and waits for its prefix; arguments as in `submit_prefill`."""
        return self.submit_prefill(text, prefix=prefix, progress=progress).result()

    def submit_prefill(
        self,
        text: str | Sequence[int],
        *,
        prefix: Prefix | None = None,
        progress: Callable[[int, int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> Prefilling:
        """Queues a context for prefill, in segments between decoding steps, and returns at once.

        A context takes no slot and does not count towards `max_queue`. Contexts and prompts take turns, as the
        docstring of the module describes.

        Args:
            text, prefix: as `prompt` and `prefix` of `request`.
            progress: called by the worker after each segment, with the number of tokens prefilled and the total. It
                must return quickly; if it raises, the prefill fails.
            check: as in `request`.
        """
        tokens = self._tokens("text", text, prefix, check)
        self._check_room("text", len(tokens), prefix, 0)
        handle = Prefilling(len(tokens), progress, self._scheduler.wake)
        self._scheduler.submit(ContextPrefill(tokens, self.segment_size, prefix, handle=handle))
        return handle

    def warm_up(self) -> None:
        """Runs steps, folds and sampling for every batch size and every combination of settings, and prefill segments.

        Kernels are compiled and CUDA graphs captured now, so that no request has to wait for that later. If prefill
        does not use CUDA graphs, only a whole segment and one of a single token are run; prompts of other lengths may
        compile kernels again.

        Raises:
            RuntimeError: requests are running, whose slots this would overwrite.
        """
        self._scheduler.run_between_steps(self._scheduler.warm_up)

    @property
    def alive(self) -> bool:
        """Whether `submit` accepts requests: the engine is not closed, and its worker has not failed."""
        return self._scheduler.alive

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the worker; None if it runs or was closed."""
        return self._scheduler.failure

    def stats(self) -> EngineStats:
        """Gauges and counters, for monitoring."""
        return self._scheduler.stats()

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Ends the worker. Later calls of `submit` raise `EngineClosedError`.

        Args:
            drain: whether to finish submitted requests first; otherwise they are cancelled.
            timeout: seconds after which unfinished requests are cancelled; None: no limit.
        """
        self._scheduler.close(drain=drain, timeout=timeout)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def _tokens(
        self, name: str, text: str | Iterable[int], prefix: Prefix | None, check: Callable[[], None] | None
    ) -> array[int]:
        """The tokens of a prompt or a context, checked before each piece, so that none is tokenized in vain."""
        if prefix is not None:
            _check_prefix(prefix, self.text_model)
        # The items of bytes are integers, too.
        if not isinstance(text, Iterable) or isinstance(text, bytes | bytearray):
            raise ArgumentTypeError(name, f"must be a string or token ids, got {type(text).__name__}")

        def check_before(most: int) -> None:
            if check is not None:
                check()
            self._scheduler.check_open()
            self._check_room(name, most, prefix, None)

        if isinstance(text, str):
            check_text(name, text)
            tokenizer = self.text_model.tokenizer
            tokens = array(TOKEN_TYPE, beginning_of(tokenizer) if prefix is None else ())
            longest = getattr(tokenizer, "longest_token", len(text))
            for piece in pieces(name, text, getattr(tokenizer, "cuts", None)):
                check_before(len(tokens) + len(piece) // longest)
                ids = tokenizer.encode(piece) if prefix is None else encode_continuation(tokenizer, piece)
                tokens.frombytes(ids.astype(TOKEN_TYPE).tobytes())
        else:
            given, tokens = iter(text), array(TOKEN_TYPE)
            while some := tuple(islice(given, PIECE)):
                check_before(len(tokens))
                self._check_ids(name, some)
                tokens.extend(some)
        if not tokens and prefix is None:
            raise ArgumentError(name, "must hold at least one token if there is no prefix to continue")
        return tokens

    def _check_ids(self, name: str, tokens: tuple[int, ...]) -> None:
        vocabulary = self.text_model.model.config.vocab_size
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ArgumentTypeError(name, f"must be a string or token ids, got {type(token).__name__} among them")
            if not 0 <= token < vocabulary:
                raise ArgumentError(name, f"must hold ids from 0 to {vocabulary - 1}, got {token}")

    def _check_room(self, name: str, tokens: int, prefix: Prefix | None, max_tokens: int | None) -> None:
        """Refuses more tokens than fit a slot; with max_tokens=None they are those known so far."""
        before = 0 if prefix is None else prefix.tokens
        if self._max_context is not None and before + tokens + (max_tokens or 0) > self._max_context:
            parts = f"{before:,} tokens of the prefix, {tokens:,} of its own and {max_tokens or 0:,} of max_tokens"
            if max_tokens is None:
                parts = f"{before:,} tokens of the prefix and {tokens:,} or more of its own"
            raise ArgumentError(name, f"is too long: {parts} exceed {self._max_context:,}, the most tokens of a slot")


def _check_prefix(prefix: Prefix, text_model: TextModel) -> None:
    model = text_model.model
    if not isinstance(prefix, Prefix):
        raise ArgumentTypeError("prefix", f"must be a Prefix, got {type(prefix).__name__}")
    if prefix.batch != 1:
        raise ArgumentError("prefix", f"must be of one text, got {prefix.batch}")
    shape = (len(model.blocks), model.config.vocab_size)
    if (len(prefix.state), prefix.logits.shape[1]) != shape:
        raise ArgumentError(
            "prefix",
            f"must be of a model with {shape[0]} layers and {shape[1]:,} tokens, "
            f"got {len(prefix.state)} and {prefix.logits.shape[1]:,}",
        )
    device = model.embedding.weight.device
    if prefix.logits.device != device:
        raise ArgumentError("prefix", f"must be on the model's device, {device}; got {prefix.logits.device}")
