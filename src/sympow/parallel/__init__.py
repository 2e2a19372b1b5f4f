"""Context parallelism: one sequence sharded over several processes, which pass states of fixed size to each other.

`Shards` describes which rank has which tokens; `attention` is `sympow.attention` on them, and `softmax_attention` the
baseline.
"""

from typing import TYPE_CHECKING, Any

from sympow.parallel.shards import Shards

if TYPE_CHECKING:
    from sympow.parallel.context_parallel import attention, softmax_attention

__all__ = ["Shards", "attention", "softmax_attention"]


def __getattr__(name: str) -> Any:
    # Imported lazily: torch.compiler.disable imports torch's compiler, which takes seconds.
    if name in __all__:
        from sympow.parallel import context_parallel

        return getattr(context_parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
