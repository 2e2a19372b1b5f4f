"""`ShortConvolution`: the causal convolution over the last tokens' queries, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sympow.ops.short_convolution import short_convolution


class ShortConvolution(nn.Module):
    """y_i = Σ_j w_j ⊙ x_(i−j) over the last `width` tokens, each channel on its own; no bias, no activation.

    It starts as the identity: the tap of the current token is 1 and all others are 0. A layer then begins as the same
    layer without a convolution, whose scale of queries, keys and values is known to train; the other taps get
    gradients from the first step on, since these depend on the inputs and not on the taps.

    Args:
        channels: of queries, keys and values together.
        width: taps, at least 2.

    Attributes:
        weight: w, (width, channels), the tap of the current token first.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the convolution to the identity."""
        with torch.no_grad():
            self.weight.copy_(self.initial())

    def initial(self) -> Tensor:
        """The weight of the identity."""
        weight = torch.zeros_like(self.weight)
        weight[0] = 1.0
        return weight

    @property
    def channels(self) -> int:
        return self.weight.shape[-1]

    @property
    def width(self) -> int:
        return self.weight.shape[-2]

    def forward(
        self, x: Tensor, conv_state: Tensor | None = None, cu_seqlens: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `short_convolution`."""
        return short_convolution(x, self.weight, conv_state, cu_seqlens, mask)

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The last inputs before the first token: zeros, (batch, width − 1, channels)."""
        return torch.zeros(batch, self.width - 1, self.channels, dtype=dtype, device=device)

    @torch.no_grad()
    def step(self, x: Tensor, conv_state: Tensor) -> Tensor:
        """y of one token, (b, 1, channels); updates the last inputs in place.

        Args:
            x: (b, 1, channels).
            conv_state: (b', width − 1, channels). Where b' < b, rows beyond are padding of a batch and returned as they
                are.
        """
        rows = len(conv_state)
        y, after = self(x[:rows], conv_state)
        conv_state.copy_(after)
        return y if rows == len(x) else torch.cat([y, x[rows:]])
