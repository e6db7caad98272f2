"""Trains word vectors asynchronously: no trainer waits for another (word2vec on parameter servers).

    rpcrun --standalone --role ps:2,service=tensorwire.parameter_server --role trainer:2 \\
           -m tutorials.parameter_server.words

The text is Python's own: the language reference that ``help()`` shows. Each trainer reads its
share, draws pairs of words that stand near each other, and others that do not (Mikolov and
others, 2013). Ids are hashes of the words: there is no vocabulary to agree on, and a row
begins when its word is pushed for the second time.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, normalize
from tqdm import tqdm

import rpc
from tensorwire import parameter_server as ps
from tutorials.arguments import positive
from tutorials.parameter_server import roles
from tutorials.parameter_server.clicks import area_under_curve
from tutorials.pictures import figure, save

_DIM = 32
_WINDOW = 4
_OTHERS = 5
"""Words that do not belong, for each that does."""
_RARE = 3e-4
"""The share of the text below which all of a word's occurrences are read."""
_ASKED = ("list", "exception", "class", "iterator", "integer", "import")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Words in the middle, and for each of them one that stood near it and some that did not."""

    middles: Tensor
    near: Tensor


class Vectors(nn.Module):
    """Two vectors for each word: as the one in the middle, and as one near it."""

    def __init__(self, cluster: ps.Cluster, seed: int) -> None:
        super().__init__()
        rule, admit = ps.Adagrad(lr=0.2), ps.MinCount(2)
        self.words = cluster.table("middles", _DIM, rule, init=ps.Uniform(0.1, seed), admit=admit)
        near = cluster.table("near", _DIM, rule, init=ps.Uniform(0.1, seed + 1), admit=admit)
        self.middles, self.near = ps.Embedding(self.words), ps.Embedding(near)

    def forward(self, pairs: Pairs) -> Tensor:
        """The log-odds that words stand near each other."""
        middles, near = self.middles(pairs.middles), self.near(pairs.near)
        agreement: Tensor = (middles.unsqueeze(1) * near).sum(2)
        return agreement


class Text:
    """The words of a text as ids."""

    def __init__(self, words: list[str], seed: int) -> None:
        self._ids = ps.hashed(words)
        self._draw = torch.Generator().manual_seed(seed)

    def pairs(self, count: int) -> Pairs:
        """Draws pairs; the first of each row of ``near`` did stand near."""
        last = len(self._ids) - _WINDOW
        places = torch.randint(_WINDOW, last, (count,), generator=self._draw)
        steps = torch.randint(1, _WINDOW + 1, (count,), generator=self._draw)
        signs = torch.randint(0, 2, (count,), generator=self._draw) * 2 - 1
        others = torch.randint(0, len(self._ids), (count, _OTHERS), generator=self._draw)
        near = torch.cat(((places + steps * signs).unsqueeze(1), others), 1)
        return Pairs(self._ids[places], self._ids[near])

    def batches(self, steps: int, count: int) -> Iterator[Pairs]:
        """So many batches of pairs."""
        for _ in range(steps):
            yield self.pairs(count)


def read() -> list[str]:
    """The words of Python's language reference, in order; the more frequent, the more left out."""
    from pydoc_data.topics import topics

    words = re.findall(r"[a-z]{2,}", " ".join(topics.values()).lower())
    count = Counter(words)
    draw = random.Random(0)
    return [word for word in words if draw.random() < (_RARE * len(words) / count[word]) ** 0.5]


def targets(scores: Tensor) -> Tensor:
    """1 for the word that stood near, 0 for the others."""
    wanted = torch.zeros_like(scores)
    wanted[:, 0] = 1
    return wanted


def train(
    options: argparse.Namespace, model: Vectors, optimizer: ps.Optimizer, trainer: int, count: int
) -> dict[int, float]:
    """Trains on one share of the text; trainer 0 measures on pairs of the part nobody reads."""
    words = read()
    tenth = len(words) // 10
    mine = words[tenth:][trainer * 9 * tenth // count : (trainer + 1) * 9 * tenth // count]
    text, unread = Text(mine, options.seed + trainer), Text(words[:tenth], options.seed)
    test, areas = unread.pairs(4000), {}
    bar = tqdm(total=options.steps, unit="step", disable=None if trainer == 0 else True)
    batches = text.batches(options.steps, options.batch_size)
    ahead = ps.prefetch(
        batches, model.middles, model.near, ids=lambda pairs: (pairs.middles, pairs.near)
    )
    for step, pairs in enumerate(ahead, 1):
        optimizer.zero_grad()
        scores = model(pairs)
        torch.autograd.backward(binary_cross_entropy_with_logits(scores, targets(scores)))
        optimizer.step()
        bar.update()
        if trainer == 0 and (step % max(1, options.steps // 6) == 0 or step == options.steps):
            areas[step] = measure(model, test)
            bar.write(f"step {step}: AUC {areas[step]:.4f}")
    bar.close()
    return areas


def measure(model: Vectors, test: Pairs) -> float:
    """Measures how well words that stood near each other are told from others."""
    with torch.no_grad():
        scores = model(test)
        return area_under_curve(scores.flatten(), targets(scores).flatten())


def show_neighbours(model: Vectors) -> None:
    """Prints the words with the nearest vectors for some words."""
    known = sorted({word for word in read() if len(word) > 3})
    vectors = normalize(model.words.pull(ps.hashed(known)))
    for word in _ASKED:
        nearest = (vectors @ vectors[known.index(word)]).topk(5).indices[1:].tolist()
        print(f"{word:>10}: {', '.join(known[each] for each in nearest)}")


def main() -> None:
    """Joins the group, trains, and leaves; trainer 0 says how it went."""
    made = roles.parser(__doc__, "tutorials.parameter_server.words", "words")
    made.add_argument("--steps", type=positive, default=2000, help="(%(default)s)")
    made.add_argument("--batch-size", type=positive, default=512, help="pairs (%(default)s)")
    options, place = made.parse_args(), roles.place(made)
    torch.set_num_threads(1)
    rpc.init_rpc()
    cluster = ps.connect(place.servers, consistency=ps.Async())
    model = Vectors(cluster, options.seed)
    begin = time.monotonic()
    areas = train(options, model, ps.Optimizer(cluster, model), place.trainer, place.trainers)
    cluster.finish()
    if place.trainer == 0:
        print(f"{options.steps} steps in {time.monotonic() - begin:.1f} s")
        print(f"final AUC: {areas[options.steps]:.4f}")
        show_neighbours(model)
        draw(areas, cluster.stats()["staleness"], options.output / "words.png")
    rpc.shutdown()


def draw(areas: dict[int, float], staleness: dict[int, int], path: Path) -> None:
    """Draws how well trainers did on the way, and how stale the rows were that they trained on.

    Args:
        areas: by step, the area under the curve.
        staleness: how many pulls of trainer 0 lacked so many steps of the slowest trainer.
        path: of the picture.
    """
    drawn = figure(9, 3.4)
    area, stale = drawn.subplots(1, 2)
    area.plot(list(areas), list(areas.values()), marker="o")
    area.grid(alpha=0.3)
    area.set(title="near or not: AUC on unread text", xlabel="step of trainer 0")
    stale.bar(list(staleness), list(staleness.values()), width=0.9)
    stale.set(title="pulls of trainer 0", xlabel="steps by which the slowest trainer was behind")
    save(drawn, path)


if __name__ == "__main__":
    main()
