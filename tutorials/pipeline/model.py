"""A small transformer that predicts the next character, as a list of layers.

Nothing in this file knows of pipelines: it is what anybody would write for one process.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

_HEADS = 4


class Embedding(nn.Module):
    """Characters and their places, as vectors."""

    def __init__(self, characters: int, length: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(length, width)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Take texts as numbers, ``(batch, length)``."""
        vectors: Tensor = self.characters(text) + self.places.weight[: text.shape[1]]
        return vectors


class Block(nn.Module):
    """Attention to the characters before, then two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return vectors, ``(batch, length, width)``."""
        batch, length, width = x.shape
        heads = self.project(self.before_attention(x)).view(batch, length, 3 * _HEADS, -1)
        query, key, value = heads.transpose(1, 2).chunk(3, 1)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(attended.transpose(1, 2).reshape(batch, length, width))
        widened: Tensor = gelu(self.widen(self.before_layers(x)))
        result: Tensor = x + self.narrow(widened)
        return result


def transformer(characters: int, length: int, width: int, blocks: int) -> nn.Sequential:
    """All layers. The last has the same weight as the first: characters in, characters out."""
    embedding = Embedding(characters, length, width)
    head = nn.Linear(width, characters, bias=False)
    head.weight = embedding.characters.weight
    layers = [embedding, *(Block(width) for _ in range(blocks)), nn.LayerNorm(width), head]
    return nn.Sequential(*layers)


def loss(scores: Tensor, following: Tensor) -> Tensor:
    """The mean cross entropy of scores of each next character."""
    return cross_entropy(scores.flatten(0, 1), following.flatten())


def beginnings(model: nn.Sequential, stages: int) -> list[str]:
    """The names of the layers with which stages begin, but the first: as many blocks in each."""
    blocks = [name for name, layer in model.named_children() if isinstance(layer, Block)]
    return [blocks[len(blocks) * stage // stages] for stage in range(1, stages)]
