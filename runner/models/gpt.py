"""GPT: a decoder-only transformer with layer norms before each sublayer, as in GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.errors import UserError


class Attention(nn.Module):
    """Causal multi-head self-attention: (B, T, width) -> (B, T, width).

    `mask`, bool (B, 1, T, T), replaces the causal mask: a token attends to the tokens where it is true.
    """

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=dropout)
        return F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


class Mlp(nn.Module):
    """Two linear layers with a GELU between them and a hidden size of 4 * width: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.dropout = dropout
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class Block(nn.Module):
    """Attention and an MLP, each with a LayerNorm before it and a residual connection around it."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, heads, dropout, bias)
        self.norm_mlp = nn.LayerNorm(width, bias=bias)
        self.mlp = Mlp(width, dropout, bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm_attention(x), mask)
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class GPT(nn.Module):
    """Map token ids (B, T) to logits (B, T, vocab_size) of the next token.

    With `document_ids` (B, T), a token attends only to itself and to earlier tokens of its document. The position of a
    token is its index in the row, unless you pass `position_ids` (B, T).

    `blocks` is a ModuleList, so that you can shard or compile each block separately. With tied weights, the output
    layer is the token embedding: one parameter, saved once.

    Args:
        vocab_size: number V of different tokens.
        sequence_length: the largest T. Positions are learned.
        layers: number of blocks.
        heads: number of attention heads. It must divide `width`.
        width: size of the residual stream.
        dropout: probability, for the embedding, the attention weights and each residual branch.
        bias: whether linear layers and norms have a bias.
        tie_weights: use the token embedding as the output layer.

    Raises:
        UserError: an argument is out of its range.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        sequence_length: int = 256,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        bias: bool = True,
        tie_weights: bool = True,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, sequence_length=sequence_length, layers=layers, heads=heads, width=width)
        if width % heads:
            raise UserError(f"model.width={width} must be a multiple of model.heads={heads}")
        if not 0.0 <= dropout < 1.0:
            raise UserError(f"model.dropout={dropout} must be from 0 to below 1")
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.dropout = dropout
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = None if tie_weights else nn.Linear(width, vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize weights from N(0, 0.02) and biases with 0.

        The last layer of each residual branch is scaled by 1/sqrt(2 layers), so that the variance of the residual
        stream does not grow with depth (GPT-2, section 2.3).
        """
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        scale = 1.0 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                parameter.mul_(scale)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        length = input_ids.shape[-1]
        if length > self.sequence_length:
            raise UserError(
                f"a sample of {length} tokens is longer than model.sequence_length={self.sequence_length}: "
                "lower data.sequence_length or raise model.sequence_length"
            )
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)
        x = F.dropout(self.tokens(input_ids) + self.positions(position_ids), self.dropout, self.training)
        mask = None if document_ids is None else within_documents(document_ids)
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)


def within_documents(document_ids: Tensor) -> Tensor:
    """Return which tokens (last dimension) each token attends to: its document's, up to itself. Bool (B, 1, T, T)."""
    # Padding attends to padding: a softmax over nothing would be NaN.
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]


def check_sizes(**sizes: int) -> None:
    """Raise UserError for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"model.{name}={size} must be 1 or more")
