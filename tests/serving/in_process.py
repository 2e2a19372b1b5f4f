"""A server in the process of the test, as an application that is called without a network."""

from contextlib import asynccontextmanager

from sympow.serving.engine.engine import Engine
from sympow.serving.web.app import create_app
from sympow.serving.web.context_folder import ContextFolder
from sympow.serving.web.contexts import ContextStore
from sympow.serving.web.gatekeeping import ServerOptions
from sympow.serving.web.openai import Service


@asynccontextmanager
async def serving(text_model, folder, options=None, slots=2):
    """The service of a model named "tiny", with the attribute `app`."""
    with Engine(text_model, slots) as engine:
        contexts = ContextStore(engine, ContextFolder(folder, text_model.model, "a model's"), 0, 10)
        service = Service("tiny", engine, contexts, options or ServerOptions())
        service.app = create_app(service)
        yield service
        await contexts.close()
