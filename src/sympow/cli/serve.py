"""The command `sympow serve`."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from sympow.checks import check_at_least, check_finite
from sympow.cli.common import Device, Dtype, device_and_dtype, name_of
from sympow.errors import ArgumentError
from sympow.extras import require

if TYPE_CHECKING:
    from sympow.serving.web.context_folder import ContextFolder

LARGEST_PORT = 65_535
MODULES = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")


def serve(
    model: Annotated[Path, typer.Argument(help="Model folder of a run, or in Hugging Face format.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")] = 8_000,
    slots: Annotated[int, typer.Option(help="Requests decoded at once; memory is allocated for all slots.")] = 64,
    model_name: Annotated[str | None, typer.Option(help="Model name in the API; by default the folder's name.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with one API key per line; every request must send one of them.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Name that the Host header may have; repeatable.")
    ] = None,
    contexts: Annotated[
        Path | None, typer.Option(help="Folder to keep contexts in; by default they are lost when the server stops.")
    ] = None,
    context_bytes: Annotated[
        int, typer.Option(help="Bytes of contexts in memory; beyond it the least recently used are on disk only.")
    ] = 2**32,
    max_contexts: Annotated[int, typer.Option(help="The most contexts that the server keeps.")] = 1_000,
    prefix_cache_bytes: Annotated[
        int, typer.Option(help="Bytes of the prefix cache, from which prompts with a known prefix start; 0: no cache.")
    ] = 2**30,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait for a slot; more are refused.")] = 256,
    max_context: Annotated[
        int | None, typer.Option(help="The most tokens of a slot, prompt and completion; softmax models need it.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The largest max_tokens of a request.")] = 2**16,
    max_body: Annotated[int, typer.Option(help="The most bytes of a request body.")] = 2**26,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    grace: Annotated[float, typer.Option(help="Seconds that running requests get to finish on shutdown.")] = 30.0,
    segment_size: Annotated[
        int | None,
        typer.Option(help="Prompt tokens prefilled between two steps; by default 2048 on a GPU, 256 on a CPU."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API.

    Requests are batched continuously. GET / is a web page to try the model with. Ctrl-C or SIGTERM stops the server
    once running requests have ended.
    """
    for module in MODULES:
        require(module, "serve")
    import torch

    from sympow.data.plain_text import check_text, read_text
    from sympow.files import check_can_write
    from sympow.generation.prefix import fingerprint_of
    from sympow.generation.text import TextModel
    from sympow.serving.engine.engine import Engine
    from sympow.serving.engine.scheduler import EngineClosedError
    from sympow.serving.web.app import create_app
    from sympow.serving.web.context_folder import ContextFolder
    from sympow.serving.web.contexts import ContextStore
    from sympow.serving.web.gatekeeping import ServerOptions, allowed_hosts, is_local, read_keys
    from sympow.serving.web.openai import Service
    from sympow.serving.web.server import StoppableServer, bind, url_of

    if not 0 <= port <= LARGEST_PORT:
        raise ArgumentError("port", f"must be between 0 and {LARGEST_PORT}, got {port}")
    check_at_least("context_bytes", context_bytes, 0)
    check_at_least("max_contexts", max_contexts, 0)
    check_finite("grace", grace)
    if grace < 0:
        raise ArgumentError("grace", f"must be at least 0, got {grace}")
    if model_name is not None:
        check_text("model_name", model_name)
    keys = () if api_key_file is None else tuple(read_keys(read_text(api_key_file)))
    if contexts is not None:
        check_can_write("contexts", contexts, "folder")
    device, dtype = device_and_dtype(device, dtype)
    options = ServerOptions(keys, allowed_hosts(host, allow_host or ()), max_body, max_tokens, timeout)
    if not keys and not is_local(host):
        _say(f"anyone who can reach {host} can use this server: --api-key-file limits that")
    # The socket is bound before the model is loaded, which may take minutes.
    with bind(host, port) as bound, TemporaryDirectory(prefix="sympow-contexts-") as temporary:
        started = time.perf_counter()
        _say(f"loading {model}")
        text_model, name = TextModel.load(model, device, getattr(torch, dtype)), model_name or name_of(model)
        parameters = sum(parameter.numel() for parameter in text_model.model.parameters())
        _say(f"loaded {name}: {parameters:,} parameters, {dtype} on {device}, {_seconds(started)}")
        engine = Engine(
            text_model,
            slots,
            segment_size=segment_size,
            max_context=max_context,
            max_queue=max_queue,
            prefix_cache_bytes=prefix_cache_bytes,
        )
        with engine:
            stats = engine.stats()
            total = stats.slots * stats.slot_nbytes
            _say(f"{stats.slots} slots of {stats.slot_nbytes / 1e6:,.1f} MB: {total / 1e9:,.2f} GB")
            started = time.perf_counter()
            _say("warming up")
            engine.warm_up()
            _say(f"warmed up, {_seconds(started)}")
            gpt = text_model.model
            folder = ContextFolder(contexts or Path(temporary), gpt, fingerprint_of(gpt))
            _say(_describe_contexts(folder, contexts))
            store = ContextStore(engine, folder, context_bytes, max_contexts)
            service = Service(name, engine, store, options)
            server = StoppableServer(
                create_app(service),
                service,
                grace=grace,
                ready=lambda: typer.echo(f"serving {name} at {url_of(bound)}"),
                stopping=lambda: _say(f"stopping: running requests have {grace:g} seconds to end"),
            )
            server.run(sockets=[bound])
    if engine.failure is not None:
        traceback.print_exception(engine.failure)
        raise EngineClosedError("the engine has failed, as shown above")
    _say("stopped")


def _describe_contexts(folder: ContextFolder, given: Path | None) -> str:
    if given is None:
        return "contexts are kept until the server stops: --contexts keeps them on disk"
    count, others = len(folder.records()), folder.others()
    left = f"; {others} of other models, or damaged, are left alone" if others else ""
    return f"{count} contexts in {given}{left}"


def _seconds(started: float) -> str:
    return f"{time.perf_counter() - started:.1f} s"


def _say(text: str) -> None:
    """Progress goes to standard error; standard output has the address."""
    typer.echo(text, err=True)
