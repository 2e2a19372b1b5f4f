"""`PrefixCache`: states of earlier prompts, from which later prompts with the same prefix start.

States are kept at segment boundaries and at the ends of prompts. The key of a segment boundary is a hash of all tokens
before it, chained from segment to segment. The key of the end of a prompt is that of the last segment boundary in it,
and the tokens after that boundary. Beyond a budget in bytes the least recently used states are evicted.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from sympow.generation.prefix import Prefix

# The type of a token's id in an array, of four bytes.
TOKEN_TYPE = "I"
WIDTH = array(TOKEN_TYPE).itemsize
# The hash of no tokens, with which chains begin.
ROOT = b""


@dataclass(frozen=True)
class TokenChain:
    """A prompt's tokens, with a hash for each segment boundary.

    Attributes:
        content: the tokens, four bytes each.
        segment_size: tokens per segment.
        hashes: hashes of all tokens before each segment boundary, beginning with that of no tokens.
    """

    content: bytes
    segment_size: int
    hashes: tuple[bytes, ...]

    @classmethod
    def of(cls, tokens: Sequence[int], segment_size: int) -> TokenChain:
        content = array(TOKEN_TYPE, tokens).tobytes()
        step = segment_size * WIDTH
        hashes = [ROOT]
        for start in range(0, len(content) - step + 1, step):
            hashes.append(blake2b(hashes[-1] + content[start : start + step], digest_size=32).digest())
        return cls(content, segment_size, tuple(hashes))

    def key(self, tokens: int) -> tuple[bytes, bytes]:
        """The key of the first `tokens` tokens: the hash at the last segment boundary, and the tokens after it."""
        border = tokens // self.segment_size
        return self.hashes[border], self.content[border * self.segment_size * WIDTH : tokens * WIDTH]


@dataclass
class PrefixCache:
    """States of prompts, by their tokens.

    Args:
        budget: the most bytes to hold; 0: nothing is cached.

    Attributes:
        nbytes: bytes held.
        hits, misses: prompts whose first lookup found a state, or did not.
        hit_tokens: tokens that need no prefill because of these hits.
    """

    budget: int
    nbytes: int = 0
    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    _entries: OrderedDict[tuple[bytes, bytes], Prefix] = field(default_factory=OrderedDict)
    _tails: dict[bytes, set[bytes]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, chain: TokenChain, beyond: int = 0) -> Prefix | None:
        """The longest prefix of a prompt whose state is held and that is longer than `beyond` tokens."""
        step = chain.segment_size * WIDTH
        for border in range(len(chain.hashes) - 1, beyond // chain.segment_size - 1, -1):
            tails = self._tails.get(chain.hashes[border], ())
            fitting = [tail for tail in tails if chain.content.startswith(tail, border * step)]
            if fitting:
                longest = max(fitting, key=len)
                if border * chain.segment_size + len(longest) // WIDTH <= beyond:
                    return None
                key = (chain.hashes[border], longest)
                self._entries.move_to_end(key)
                return self._entries[key]
        return None

    def count(self, found: Prefix | None) -> None:
        """Counts a prompt's first lookup."""
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self.hit_tokens += found.tokens

    def add(self, chain: TokenChain, prefix: Prefix) -> None:
        """Caches the state after the first `prefix.tokens` tokens of a prompt, unless it alone exceeds the budget."""
        key, size = chain.key(prefix.tokens), prefix.total_nbytes
        if size > self.budget:
            return
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        self._entries[key] = prefix
        self._tails.setdefault(key[0], set()).add(key[1])
        self.nbytes += size
        while self.nbytes > self.budget:
            (border, tail), dropped = self._entries.popitem(last=False)
            self.nbytes -= dropped.total_nbytes
            self._tails[border].discard(tail)
            if not self._tails[border]:
                del self._tails[border]

    def clear(self) -> None:
        """Drops all states."""
        self._entries.clear()
        self._tails.clear()
        self.nbytes = 0
