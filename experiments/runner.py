"""Trains what an experiment has and the results lack, one run or sweep after another.

Any number of processes may do this at the same time, on one machine or on many that share the folders: each claims a
run or sweep before it begins, and leaves to others what they have claimed. What is done is skipped, and what was
interrupted is continued.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

from experiments.store import Store
from experiments.sweep import Sweep
from experiments.text_run import PlannedRun

# What is trained and has results.
Work = PlannedRun | Sweep


def is_alone() -> bool:
    """Whether this process trains by itself, not with others of torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1


def train_all(
    experiment: str,
    works: Callable[[Store], Sequence[Work]],
    results: Path,
    out: Path,
    device: str,
    command: Callable[[str], str],
    say: Callable[[str], None],
) -> bool:
    """Trains what is not done; returns whether everything is done or left to other processes, not stopped.

    Args:
        experiment: its name.
        works: what it has, as far as that can be told from the results so far.
        results: folder of the store.
        out: folder of what is being trained.
        device: "cpu" or "cuda".
        command: what repeats a run or sweep, by its name.
        say: prints a line of progress.
    """
    elsewhere: set[str] = set()
    while True:
        store = Store(results)
        known = works(store)
        left = [work for work in known if not _is_done(store, experiment, work)]
        waiting = [work for work in left if work.name not in elsewhere]
        if not waiting:
            return True
        work = waiting[0]
        folder = work.folder(out, experiment)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Processes of torchrun train together; the lock of a run's folder keeps others out.
        claim = FileLock(folder.parent / f"{folder.name}.lock", blocking=False) if is_alone() else nullcontext()
        try:
            with claim:
                # Another process may have finished it since the results were read.
                if _is_done(store := Store(results), experiment, work):
                    continue
                say(f"{work.name}: {len(known) - len(left) + 1} of {len(known)}")
                found = work.train(folder, device, command(work.name), say)
                if found is None:
                    return False
                if found:
                    store.add(experiment, found)
                    work.discard(folder)
        except Timeout:
            elsewhere.add(work.name)
            say(f"{work.name}: another process is training it")
        if not is_alone():
            return True


def _is_done(store: Store, experiment: str, work: Work) -> bool:
    """Whether a run or sweep has results; those of another experiment are then in the table of this one, too."""
    found = store.find(experiment, work)
    if found is None:
        return False
    table = store.tables.get(experiment, {})
    if missing := [result for result in found if result.name not in table]:
        store.add(experiment, missing)
    return True
