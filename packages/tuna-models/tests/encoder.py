#!/usr/bin/env python3
"""Writes a small encoder of text as `torch.onnx.export` writes it, its weights in a file of their
own: `encoder.py model.onnx`.

In the form of BERT (Devlin et al. 2018): token ids, a mask and positions, two layers, an open
sequence length with `--open`. Needs torch and onnxscript, which the tests' machines need not have.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Layer(nn.Module):
    """Attention and two products, each with a residual and a layer normalisation after it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.merged = (
            nn.Linear(hidden, hidden) for _ in range(4)
        )
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.first_norm, self.second_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Any, mask: Any) -> Any:
        parts = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        x = self.first_norm(x + self.merged(mixed.transpose(1, 2).flatten(2)))
        return self.second_norm(x + self.narrow(nn.functional.gelu(self.wide(x))))


class Encoder(nn.Module):
    """Embeddings of tokens and positions, and the layers."""

    def __init__(self, hidden: int, heads: int, layers: int, vocabulary: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(longest, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any) -> Any:
        x = self.norm(self.tokens(input_ids) + self.places(position_ids))
        mask = attention_mask[:, None, None, :].to(torch.bool)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def write(
    path: Path, *, hidden: int = 64, length: int = 16, vocabulary: int = 500, is_open: bool = False
) -> None:
    """Export it, with `length` tokens or with that extent left open; beside `path` stands
    `path`.data."""
    torch.manual_seed(0)
    model = Encoder(hidden, max(2, hidden // 64), 2, vocabulary, 2 * length).eval()
    ids = torch.randint(0, vocabulary, (1, length))
    given = ids, torch.ones_like(ids), torch.arange(length)[None]
    extents = (
        [{1: torch.export.Dim("sequence", max=2 * length)} for _ in given] if is_open else None
    )
    program = torch.onnx.export(model, given, dynamo=True, dynamic_shapes=extents, verbose=False)
    assert program is not None
    program.save(str(path), external_data=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Write a small encoder as torch.onnx.export writes it."
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=500)
    parser.add_argument(
        "--open", dest="is_open", action="store_true", help="Leave the sequence length open."
    )
    asked = vars(parser.parse_args())
    write(asked.pop("path"), **asked)
