"""Where the processes of a run meet, under a name that no earlier attempt had.

torchrun keeps the store in which processes find each other when it restarts them, and all that they left in it:
addresses at which nobody listens any more. How often a machine's processes were restarted is no name for the attempt,
since torchrun counts that for each machine by itself. So the first process chooses one, and tells each of the others in
answer to a question that is new, too.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

POLL = 0.02


def kept_by_torchrun() -> bool:
    """Whether torchrun keeps the store; otherwise the first process does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agree_on_name(rank: int, world_size: int, timeout: timedelta = default_pg_timeout) -> str:
    """A name for this attempt, the same for all its processes."""
    store = PrefixStore("sympow/meeting", _connect(timeout))
    if rank == 0:
        return _welcome(store, world_size, timeout)
    question = uuid.uuid4().hex
    store.set(f"question/{rank}", question)
    name = store.get(f"answer/{question}").decode()  # waits
    store.set(f"thanks/{name}/{rank}", "")
    return name


def connect(name: str, purpose: str, timeout: timedelta = default_pg_timeout) -> Store:
    """A connection of its own to the store, with keys for one attempt and one purpose."""
    return PrefixStore(f"sympow/{name}/{purpose}", _connect(timeout))


def _welcome(store: Store, world_size: int, timeout: timedelta) -> str:
    """Answers all questions, those of earlier attempts included, until everyone of this one has heard."""
    name = uuid.uuid4().hex
    missing = set(range(1, world_size))
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"thanks/{name}/{other}"]):
                missing.discard(other)
            elif store.check([f"question/{other}"]):
                store.set(f"answer/{store.get(f'question/{other}').decode()}", name)
        if missing and time.monotonic() > end:
            raise TimeoutError(f"ranks {', '.join(map(str, sorted(missing)))} did not come within {timeout}")
        time.sleep(POLL)
    return name


def _connect(timeout: timedelta) -> Store:
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
