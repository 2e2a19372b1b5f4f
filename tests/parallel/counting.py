"""Counts the bytes that a process sends, by wrapping the collectives of torch.distributed."""

from contextlib import contextmanager

import torch.distributed as dist

# A ring all-gather sends all shards but one.
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")


class Traffic:
    def __init__(self):
        self.sent = 0


@contextmanager
def counted():
    """Counts the bytes that this process sends inside the block."""
    traffic = Traffic()
    before = {name: getattr(dist, name) for name in (*GATHERS, *SCATTERS, "batch_isend_irecv") if hasattr(dist, name)}
    # Other collectives would not be counted.
    others = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "reduce", "all_gather", "send", "recv")}

    def counting(name, original):
        def gather(output, given, *args, group=None, **options):
            traffic.sent += (group.size() - 1) * given.nbytes
            return original(output, given, *args, group=group, **options)

        def scatter(output, given, *args, group=None, **options):
            traffic.sent += (group.size() - 1) * output.nbytes
            return original(output, given, *args, group=group, **options)

        def exchange(operations):
            traffic.sent += sum(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
            return original(operations)

        return gather if name in GATHERS else scatter if name in SCATTERS else exchange

    def refuse(*args, **options):
        raise AssertionError("a collective that is not counted")

    for name, original in before.items():
        setattr(dist, name, counting(name, original))
    for name in others:
        setattr(dist, name, refuse)
    try:
        yield traffic
    finally:
        for name, original in (before | others).items():
            setattr(dist, name, original)
