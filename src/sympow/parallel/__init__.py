"""One sequence over several processes: each has a part of the tokens, and gets what the parts before it leave behind.

`Shards` says which tokens are whose, `attention` is `sympow.attention` on them.
"""

from sympow.parallel.attention import attention
from sympow.parallel.shards import Shards

__all__ = ["Shards", "attention"]
