"""One sequence over several processes: each has a part of the tokens, and gets what the parts before it leave behind.

`Shards` says which tokens are whose, `attention` is `sympow.attention` on them.
"""

from typing import TYPE_CHECKING, Any

from sympow.parallel.shards import Shards

if TYPE_CHECKING:
    from sympow.parallel.context_parallel import attention

__all__ = ["Shards", "attention"]


def __getattr__(name: str) -> Any:
    # Late: to keep a function from being compiled brings in torch's compiler, which takes seconds.
    if name == "attention":
        from sympow.parallel.context_parallel import attention

        return attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
