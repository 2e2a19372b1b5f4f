"""The short convolution of queries, keys and values: causal, depthwise, over the last few tokens of a sequence.

    y_i = Σ_j w_j ⊙ x_(i−j),    j = 0 … width − 1

Tokens before the first one count as zeros. The last width − 1 inputs are all that later tokens need of the past: they
are a layer's `conv_state`, (b, width − 1, channels), oldest first.

There is no activation after it. Mamba-2 and Gated DeltaNet have a SiLU there, whose features should be positive;
(q·k)^p with an even p is non-negative as it is, and a SiLU would leave keys a part of the directions by which the power
tells them apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.errors import UserError
from sympow.ops.validation import check_documents


def short_convolution(
    x: Tensor,
    taps: Tensor,
    conv_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y (b, t, channels), and the last inputs of each sequence, (b, width − 1, channels), in the dtype of x.

    Args:
        x: (b, t, channels).
        taps: w, (width, channels), or (width, b, 1, channels) with taps of its own for each sequence; that of the
            current token first.
        conv_state: the last inputs before x, (b, width − 1, channels), or of each document; None: there were none.
        cu_seqlens: offsets of packed documents, (documents + 1,) with b = 1: nothing passes from one to the next.
        mask: (b, t) bool, False for padding, which is skipped: the tokens before a token are the last ones that are
            not padding. y of padding is finite, but has no meaning.
    """
    taps = taps.to(x.dtype)
    reach = taps.shape[0] - 1
    sequences = x.shape[0]
    if cu_seqlens is not None:
        check_documents(cu_seqlens, x)
        sequences = len(cu_seqlens) - 1
    if conv_state is None:
        conv_state = x.new_zeros(sequences, reach, x.shape[2])
    elif conv_state.shape != (sequences, reach, x.shape[2]):
        raise UserError(
            f"the state's inputs of short_conv must be {(sequences, reach, x.shape[2])}, for as many sequences, the "
            f"width less 1 and the channels; got {tuple(conv_state.shape)}"
        )
    conv_state = conv_state.to(x.dtype)
    if cu_seqlens is not None:
        return _over_documents(x, taps, conv_state, cu_seqlens.to(x.device))
    if mask is not None:
        return _without_padding(x, taps, conv_state, mask)
    extended = torch.cat([conv_state, x], dim=1)
    # A copy: a state must not keep the memory of a whole segment.
    return _convolve(extended, taps), extended[:, extended.shape[1] - reach :].clone()


def _convolve(extended: Tensor, taps: Tensor) -> Tensor:
    """y of all but the first width − 1 of the inputs (b, width − 1 + t, channels)."""
    reach = taps.shape[0] - 1
    length = extended.shape[1] - reach
    y = taps[0] * extended[:, reach:]
    for j in range(1, reach + 1):
        y = torch.addcmul(y, taps[j], extended.narrow(1, reach - j, length))
    return y


def _over_documents(x: Tensor, taps: Tensor, conv_state: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The same for packed documents: conv_state (documents, width − 1, channels), x (1, t, channels)."""
    reach, length = taps.shape[0] - 1, x.shape[1]
    offsets = offsets.long()
    starts, sizes = offsets[:-1], offsets.diff()
    positions = torch.arange(length, device=x.device)
    places = positions - starts[torch.searchsorted(offsets[1:].contiguous(), positions, right=True)]
    y = taps[0] * x
    padded = pad(x, (0, 0, reach, 0))
    for j in range(1, reach + 1):
        earlier = padded.narrow(1, reach - j, length)
        y = torch.addcmul(y, taps[j], earlier.masked_fill((places < j)[:, None], 0.0))
    # What the past adds to the first tokens of each document, (documents, width − 1, channels).
    added = _convolve(pad(conv_state, (0, 0, 0, reach)), taps)
    ahead = torch.arange(reach, device=x.device)
    # Documents may be shorter than that: what they have no token for goes to a place beyond the last one.
    targets = torch.where(ahead < sizes[:, None], starts[:, None] + ahead, length)
    y = pad(y, (0, 0, 0, 1)).index_add(1, targets.flatten(), added.reshape(1, -1, x.shape[2]))[:, :length]
    # The last inputs of a document, from its tokens or, where those are few, from its past.
    last = sizes[:, None] + ahead - reach
    of_tokens = x[0][(starts[:, None] + last).clamp(min=0)]
    of_past = conv_state.gather(1, (last + reach).clamp(max=max(0, reach - 1))[..., None].expand(-1, -1, x.shape[2]))
    return y, torch.where((last >= 0)[..., None], of_tokens, of_past)


def _without_padding(x: Tensor, taps: Tensor, conv_state: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same where some tokens are padding."""
    reach, length = taps.shape[0] - 1, x.shape[1]
    extended = torch.cat([conv_state, x], dim=1)
    rank = mask.cumsum(1) - 1  # of a token among those of its row; of padding, that of the token before
    # Where the tokens are in `extended`, those of the past included, in order. Padding goes to a place beyond.
    order = rank.new_zeros(len(x), length + 1)
    order = order.scatter(1, rank.masked_fill(~mask, length), torch.arange(length, device=x.device).expand_as(rank))
    first = torch.arange(reach, device=x.device).expand(len(x), -1)
    order = torch.cat([first, reach + order[:, :length]], dim=1)

    def taken(places: Tensor) -> Tensor:
        rows = order.gather(1, places)
        return extended.gather(1, rows[..., None].expand(-1, -1, x.shape[2]))

    y = taps[0] * x
    for j in range(1, reach + 1):
        y = torch.addcmul(y, taps[j], taken((rank + reach - j).clamp(min=0)))
    return y, taken(mask.sum(1, keepdim=True) + first)
