"""Attention inside each sequence of a packed row.

On a GPU in 16 bits this is flash attention (Dao 2023) for sequences of different lengths, with dropout: torch's own
kernel, called through the operator that nested tensors use. ``torch.nn.attention.varlen`` wraps the same kernel without
dropout. In all other cases the tokens are padded into rows for torch's attention and gathered again: the result is the
same, and only attention pays for the padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from echelon.nn.packed import Bounds

FLASH_TYPES = (torch.float16, torch.bfloat16)
FLASH_WIDTH = 256  #: largest width of a head, which must also be a multiple of 8


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, *, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """Return the attention of each token to the tokens of its own sequence, [t, heads, width].

    q, k, v: queries, keys and values, [t, heads, width]
    bounds:  boundaries of the sequences, as in ``Packed.bounds``
    causal:  True if a token does not attend to later tokens; default False
    dropout: dropout probability; default 0

    >>> bounds = echelon.nn.pack([torch.arange(3), torch.arange(5)]).bounds
    >>> q = k = v = torch.rand(128, 2, 16)
    >>> out = echelon.nn.packed_attention(q, k, v, bounds, causal=True)
    """
    if has_torch_function((q, k, v)):
        mixed: Tensor = handle_torch_function(
            packed_attention, (q, k, v), q, k, v, bounds, causal=causal, dropout=dropout
        )
        return mixed
    if q.is_cuda and q.dtype in FLASH_TYPES and q.shape[-1] % 8 == 0 and q.shape[-1] <= FLASH_WIDTH:
        return _flash(q, k, v, bounds, causal, dropout)
    return _in_rows(q, k, v, bounds, causal, dropout)


def _flash(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, causal: bool, dropout: float) -> Tensor:
    offsets, longest = bounds
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, offsets, offsets, longest, longest, dropout, causal, False
    )[0]
    return out


def _in_rows(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, causal: bool, dropout: float) -> Tensor:
    tokens, rows, longest = q.shape[0], bounds.offsets.shape[0] - 1, bounds.longest
    where = bounds.owners(tokens) * longest + bounds.places(tokens)
    # a row without tokens attends to one zero, because a softmax over nothing is NaN
    lengths = (bounds.offsets[1:] - bounds.offsets[:-1]).clamp(min=1)
    at = torch.arange(longest, device=q.device)
    seen = (at < lengths[:, None])[:, None, None]
    if causal:
        seen = seen & (at <= at[:, None])

    def in_rows(x: Tensor) -> Tensor:
        room = x.new_zeros(rows * longest, *x.shape[1:])
        return room.index_copy(0, where, x).view(rows, longest, *x.shape[1:]).transpose(1, 2)

    mixed = F.scaled_dot_product_attention(in_rows(q), in_rows(k), in_rows(v), attn_mask=seen, dropout_p=dropout)
    return mixed.transpose(1, 2).flatten(0, 1).index_select(0, where)
