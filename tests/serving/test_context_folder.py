"""Contexts on disk: whole or not there, whoever is killed, and in no other place."""

import asyncio
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2 as httpx
import pytest
import torch
from server_process import ServerProcess, save_tiny_model, until

from sympow import tensor_file
from sympow.errors import ArgumentError
from sympow.generation.prefix import Prefix, fingerprint_of
from sympow.generation.text import TextModel
from sympow.serving.engine.engine import Engine
from sympow.serving.web.context_folder import WRITING, ContextFolder, Record, is_id, new_id
from sympow.serving.web.contexts import ContextStore
from sympow.serving.web.errors import ApiError, api_error

# Writes contexts until it is killed, and says when each begins.
WRITER = """
import sys
from pathlib import Path
import torch
from sympow.generation.prefix import fingerprint_of
from sympow.generation.text import TextModel
from sympow.serving.web.context_folder import ContextFolder, Record, new_id
text_model = TextModel.load(sys.argv[1])
folder = ContextFolder(Path(sys.argv[2]), text_model.model, fingerprint_of(text_model.model))
prefix = text_model.prefill("a text " * 20)
while True:
    print("next", flush=True)
    folder.write(Record(new_id(), "name", 1, prefix.tokens, prefix.nbytes), prefix)
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "model"
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def text_model(model_folder):
    return TextModel.load(model_folder)


@pytest.fixture
def opened(text_model, tmp_path):
    """Opens the folder as another process would, any number of times."""
    made = []

    def open_again(model=text_model.model):
        made.append(ContextFolder(tmp_path / "contexts", model, fingerprint_of(model)))
        return made[-1]

    yield open_again
    for folder in made:
        folder.close()


def record_of(prefix, **fields):
    return Record(**{"id": new_id(), "name": "a", "created_at": 5, "tokens": prefix.tokens, "nbytes": 1, **fields})


def hidden(folder):
    return [entry.name for entry in os.scandir(folder.path) if entry.name.startswith(WRITING)]


def test_what_was_written_is_found_by_others(opened, text_model):
    first, second = opened(), opened()
    prefix = text_model.prefill("some text")
    record = record_of(prefix)
    first.write(record, prefix)
    assert first.records() == second.records() == {record.id: record}
    assert second.find(record.id) == record
    loaded = second.load(record.id)
    assert torch.equal(loaded.logits, prefix.logits)
    assert loaded.tokens == prefix.tokens
    second.remove(record.id)
    assert first.records() == second.records() == {}
    assert first.find(record.id) is None
    # Removing what another process has removed is no mistake.
    first.remove(record.id)


def test_contexts_of_other_models_are_left_alone(opened, text_model, model_folder):
    other = TextModel.load(model_folder).model
    with torch.no_grad():
        other.embedding.weight[0, 0] += 1
    prefix = text_model.prefill("some text")
    record = record_of(prefix)
    opened().write(record, prefix)
    folder = opened(other)
    assert folder.records() == {}
    assert folder.others() == 1
    assert (folder.path / record.id).is_dir()


@pytest.mark.parametrize(
    "damage",
    ["cut off", "no prefix", "no record", "not JSON", "another id", "one more field", "a type", "no text", "a file"],
)
def test_a_context_that_is_not_whole_is_not_listed(opened, text_model, damage):
    folder = opened()
    prefix = text_model.prefill("some text")
    record, kept = record_of(prefix), record_of(prefix)
    folder.write(record, prefix)
    folder.write(kept, prefix)
    there = folder.path / record.id
    file, described = there / "state.prefix", there / "context.json"
    fields = json.loads(described.read_text())
    match damage:
        case "cut off":
            file.write_bytes(file.read_bytes()[:-1])
        case "no prefix":
            file.unlink()
        case "no record":
            described.unlink()
        case "not JSON":
            described.write_text("{")
        case "another id":
            described.write_text(json.dumps(fields | {"id": kept.id}))
        case "one more field":
            described.write_text(json.dumps(fields | {"more": 1}))
        case "a type":
            described.write_text(json.dumps(fields | {"tokens": "9"}))
        case "no text":
            described.write_text(json.dumps(fields | {"name": "a\ud800b"}))
        case "a file":
            folder.remove(record.id)
            there.write_text("")
    assert opened().records() == {kept.id: kept}


def test_only_what_nobody_writes_any_more_is_removed(opened, text_model):
    living = opened()
    dead = living.path / f"{WRITING}dead"
    (dead / new_id()).mkdir(parents=True)
    (dead / "lock").touch()
    unlocked = living.path / f"{WRITING}unlocked"
    unlocked.mkdir()
    own = hidden(living)
    assert len(own) == 3
    opened()
    left = hidden(living)
    assert not {dead.name, unlocked.name} & set(left)
    assert len(set(left) & set(own)) == 1
    # The one that lives can still write.
    prefix = text_model.prefill("x")
    living.write(record_of(prefix), prefix)
    assert len(living.records()) == 1


def test_a_failure_while_writing_leaves_nothing(opened, text_model, monkeypatch):
    folder = opened()
    prefix = text_model.prefill("x")

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(Prefix, "save", full)
    with pytest.raises(OSError, match="no space left"):
        folder.write(record_of(prefix), prefix)
    assert folder.records() == {}
    assert os.listdir(folder.path / hidden(folder)[0]) == ["lock"]


def test_a_context_that_cannot_be_opened_for_a_moment_is_found_later(opened, text_model, monkeypatch):
    prefix = text_model.prefill("x")
    record = record_of(prefix)
    opened().write(record, prefix)
    folder = opened()

    def too_many(*_, **__):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(tensor_file, "load_words", too_many)
        assert folder.records() == {}
        assert folder.find(record.id) is None
    assert folder.find(record.id) == record
    assert folder.records() == {record.id: record}


def in_a_store(text_model, folder, scenario, max_contexts=10):
    """Runs a coroutine with a store of contexts that are all read from disk."""

    async def run(engine):
        store = ContextStore(engine, folder, 0, max_contexts)
        await scenario(store)

    with Engine(text_model, 1) as engine:
        asyncio.run(run(engine))


def test_a_context_that_is_deleted_while_it_is_loaded_is_unknown(opened, text_model, monkeypatch):
    folder = opened()
    prefix = text_model.prefill("x")
    record = record_of(prefix)
    folder.write(record, prefix)
    load, loading, go_on = folder.load, threading.Event(), threading.Event()

    def slow(id_):
        loaded = load(id_)
        loading.set()
        assert go_on.wait(60)
        return loaded

    monkeypatch.setattr(folder, "load", slow)

    async def scenario(store):
        asked = asyncio.create_task(store.prefix(record.id))
        assert await asyncio.to_thread(loading.wait, 60)
        await store.delete(record.id)
        go_on.set()
        with pytest.raises(ApiError, match="there is no context"):
            await asked
        assert store.in_memory == store.loads == 0

    in_a_store(text_model, folder, scenario)


def test_a_context_that_is_written_just_now_is_listed_once(opened, text_model, monkeypatch):
    folder = opened()
    write, written, go_on = folder.write, threading.Event(), threading.Event()

    def slow(*arguments):
        write(*arguments)
        written.set()
        assert go_on.wait(60)

    monkeypatch.setattr(folder, "write", slow)

    async def scenario(store):
        made = await store.create("x", "first")
        assert await asyncio.to_thread(written.wait, 60)
        assert [(one.id, one.status) for one in store.list()] == [(made.id, "reading")]
        # It counts once, too: there is room for a second.
        second = await store.create("y", "second")
        with pytest.raises(ApiError, match="there are 2 contexts"):
            await store.create("z", "third")
        go_on.set()
        while store.reading:
            await asyncio.sleep(0.01)
        assert {one.id: one.status for one in store.list()} == {made.id: "ready", second.id: "ready"}

    in_a_store(text_model, folder, scenario, max_contexts=2)


def test_a_name_that_is_no_text_is_refused(opened, text_model):
    async def scenario(store):
        with pytest.raises(ArgumentError, match="name is not UTF-8 text: character 1 ") as caught:
            await store.create("x", "a\ud800b")
        told = api_error(caught.value)
        assert (told.status_code, told.param) == (400, "name")
        assert store.list() == []

    in_a_store(text_model, opened(), scenario)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (torch.OutOfMemoryError("no memory for a copy"), "no memory for a copy"),
        # Without the path, which is the server's alone.
        (OSError(errno.ENOSPC, "No space left", "/contexts"), "it cannot be written: No space left"),
    ],
    ids=["device", "disk"],
)
def test_a_context_that_there_is_no_room_for_has_failed(opened, text_model, monkeypatch, failure, told):
    folder = opened()

    def full(*_):
        raise failure

    monkeypatch.setattr(folder, "write", full)

    async def scenario(store):
        made = await store.create("x", "")
        while store.reading:
            await asyncio.sleep(0.01)
        now = store.get(made.id)
        assert (now.status, now.error) == ("failed", told)

    in_a_store(text_model, folder, scenario)


def test_a_folder_that_is_removed_while_serving(opened, text_model):
    folder = opened()

    async def scenario(store):
        made = await store.create("x", "")
        while store.reading:
            await asyncio.sleep(0.01)
        shutil.rmtree(folder.path)
        assert store.list() == []
        with pytest.raises(ApiError, match="there is no context"):
            await store.prefix(made.id)
        # Nobody waits for a context that could not be kept.
        with pytest.raises(ApiError, match="the server's folder of contexts has been removed") as caught:
            await store.create("y", "")
        assert caught.value.code == "contexts_removed"
        assert str(folder.path) not in caught.value.detail

    in_a_store(text_model, folder, scenario)


def test_ids_are_no_paths():
    assert is_id(new_id())
    assert new_id() != new_id()
    for text in (
        "",
        "..",
        "ctx_",
        f"../{new_id()}",
        f"{new_id()}/..",
        f"{new_id()}\n",
        new_id().upper(),
        "ctx_" + "é" * 24,
    ):
        assert not is_id(text)


def check_after_kill(folder, text_model):
    """Every listed context is whole, and nothing else is left."""
    listed = folder.records()
    assert {entry.name for entry in os.scandir(folder.path) if is_id(entry.name)} == listed.keys()
    for id_, record in listed.items():
        assert folder.load(id_).tokens == record.tokens
    # Its own, and no other's.
    assert len(hidden(folder)) == 1
    return len(listed)


def kill_a_writer(model_folder, contexts, delay):
    command = [sys.executable, "-c", WRITER, str(model_folder), str(contexts)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline()
        time.sleep(delay)
        writer.kill()
    assert writer.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_kill_9_at_many_moments(model_folder, text_model, tmp_path):
    draw = random.Random(0)
    for delay in (0.5, *(draw.uniform(0, 0.2) for _ in range(6))):
        kill_a_writer(model_folder, tmp_path, delay)
        folder = ContextFolder(tmp_path, text_model.model, fingerprint_of(text_model.model))
        count = check_after_kill(folder, text_model)
        folder.close()
    assert count > 0


@pytest.mark.slow
def test_kill_9_of_a_server_that_reads_and_writes(model_folder, tmp_path):
    """Contexts that a server said were ready are there after a restart; others are there as a whole or not at all."""
    known: dict[str, int] = {}
    for round_ in range(3):
        with (
            ServerProcess(model_folder, "--contexts", tmp_path) as process,
            httpx.Client(base_url=process.url) as client,
        ):
            listed = {one["id"]: one for one in client.get("/v1/contexts").json()["data"]}
            assert known.keys() <= listed.keys()
            for id_, context in listed.items():
                assert context["status"] == "ready"
                body = {"context": id_, "prompt": "?", "max_tokens": 2}
                answer = client.post("/v1/completions", json=body, timeout=60)
                assert answer.json()["usage"]["context_tokens"] == context["tokens"], answer.text
            made = [client.post("/v1/contexts", json={"text": f"{round_} {n} " * 100}).json() for n in range(20)]
            until(lambda made=made, client=client: any(_is_ready(client, one) for one in made))
            known |= {one["id"]: one["tokens"] for one in made if _is_ready(client, one)}
            process.kill()
    assert len(known) >= 3


def _is_ready(client, context):
    return client.get(f"/v1/contexts/{context['id']}").json()["status"] == "ready"
