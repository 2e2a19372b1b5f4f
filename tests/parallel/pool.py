"""A pool of processes with a process group, to which tests send functions to run."""

import multiprocessing
import os
import socket
import time
import traceback
from multiprocessing import connection

import torch
import torch.distributed as dist

# Timeout in seconds for a busy machine; no test waits this long otherwise.
PATIENCE = 60.0


class Pool:
    """`size` ranks over Gloo. A function runs on the first `ranks` of them, with their group as its first argument.

    After a failure the processes are ended, since some may still wait for others; the next run starts new ones.
    """

    def __init__(self, size):
        self._size, self._ends, self._processes = size, [], []

    def _start(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # The ranks are forked from a process that imports torch once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "sympow.kernels", "sympow.parallel"])
        for rank in range(self._size):
            end, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._size, port, other), daemon=True)
            process.start()
            self._ends.append(end)
            self._processes.append(process)

    def run(self, function, ranks, **arguments):
        """Runs the function on each rank; returns the results."""
        if not self._processes:
            self._start()
        waiting = dict(zip(self._ends[:ranks], range(ranks), strict=True))
        for end in waiting:
            end.send((function, ranks, arguments))
        results, end_of_patience = {}, time.monotonic() + PATIENCE
        while waiting:
            ready = connection.wait(list(waiting), timeout=end_of_patience - time.monotonic())
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {list(waiting.values())} do not answer: {function.__name__}, {arguments}")
            for end in ready:
                error, results[waiting[end]] = end.recv()
                if error is not None:
                    self.close()
                    raise AssertionError(error)
                del waiting[end]
        return [results[rank] for rank in range(ranks)]

    def close(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._ends, self._processes = [], []


def _serve(rank, size, port, end):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, size + 1)}
    while True:
        function, ranks, arguments = end.recv()
        try:
            end.send((None, function(groups[ranks], **arguments)))
        except Exception:  # noqa: BLE001 - whatever it is, the test should show it
            end.send((f"rank {rank}:\n{traceback.format_exc()}", None))
