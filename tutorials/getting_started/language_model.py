"""A language model split over workers learns to write Python.

The embedding and the decoder live on a parameter server (with three workers, on one
server each), the LSTM lives at the trainer. One training step:

    trainer                                      server
    characters ── embedding.forward ───────────▶ looks up their vectors
    vectors    ◀────────────────────────────────
    LSTM(vectors)
    hidden     ── decoder.forward ─────────────▶ scores of each next character
    scores     ◀────────────────────────────────
    backward crosses to the server and back, twice; one optimizer steps all three parts

The text is Python's own standard library, as every Python ships it. A held-out part
of it tells how well the model predicts; at the end the model writes some itself.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import autograd_dist
import rpc
from optim_dist import DistributedOptimizer
from tutorials import pictures, taking_part

_PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "importlib", "json",
             "logging", "unittest", "urllib")  # fmt: skip
_INDENT = "    "  # is one character to the model
ALPHABET = "\t\n" + "".join(chr(code) for code in range(32, 127))
_UNKNOWN = ALPHABET.index("?")
_HELD_OUT = 0.05


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as numbers of characters in the alphabet, shape ``(length,)``."""

    training: Tensor
    held_out: Tensor

    def batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Random excerpts and, for each character, the one after it: ``(length, size)`` each."""
        starts = torch.randint(len(self.training) - length, (size,))
        places = starts + torch.arange(length + 1).unsqueeze(1)
        excerpts = self.training[places]
        return excerpts[:-1], excerpts[1:]

    def bits_without_context(self) -> float:
        """Bits per held-out character if one knows only how frequent each character is."""
        seen = Counter(self.training.tolist())
        total = sum(seen.values()) + len(ALPHABET)
        bits = [-math.log2((seen[code] + 1) / total) for code in self.held_out.tolist()]
        return sum(bits) / len(bits)


def load() -> Corpus:
    """Read the standard library's packages; the last twentieth is held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for name in _PACKAGES for path in (library / name).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    text = text.replace(_INDENT, "\t")
    codes = {character: code for code, character in enumerate(ALPHABET)}
    numbers = torch.tensor([codes.get(character, _UNKNOWN) for character in text])
    training, held_out = numbers.tensor_split([int(len(numbers) * (1 - _HELD_OUT))])
    return Corpus(training, held_out)


class LanguageModel:
    """The trainer's view of the whole: two references and an LSTM of its own.

    Args:
        embedding_at: name of the worker that keeps the embedding.
        decoder_at: name of the worker that keeps the decoder.
        width: of the LSTM's state; vectors of characters are half as wide.
    """

    def __init__(self, embedding_at: str, decoder_at: str, width: int) -> None:
        characters = len(ALPHABET)
        self._embedding: Any = rpc.remote(embedding_at, nn.Embedding, (characters, width // 2))
        self._decoder: Any = rpc.remote(decoder_at, nn.Linear, (width, characters))
        self._lstm = nn.LSTM(width // 2, width)

    def __call__(self, text: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return scores of each next character, ``(length, batch, alphabet)``, and the state."""
        vectors = self._embedding.rpc_sync().forward(text)
        hidden, state = self._lstm(vectors, state)
        return self._decoder.rpc_sync().forward(hidden), state

    def parameter_references(self) -> list[rpc.RRef[Any]]:
        """References to all parameters, wherever they live; the LSTM's are here."""
        remote = [
            rpc.rpc_sync(part.owner(), _parameters_of, (part,))
            for part in (self._embedding, self._decoder)
        ]
        local = [rpc.RRef(parameter) for parameter in self._lstm.parameters()]
        return [*remote[0], *local, *remote[1]]

    def bits(self, text: Tensor) -> float:
        """Bits per character of ``text``, which is read from its beginning."""
        with torch.no_grad():
            scores, _ = self(text[:-1].unsqueeze(1))
            return cross_entropy(scores.squeeze(1), text[1:]).item() / math.log(2)

    def write(self, beginning: str, length: int, temperature: float = 0.5) -> str:
        """Go on after ``beginning``, one character at a time, drawn from the predictions."""
        written = beginning
        state = None
        text = torch.tensor([ALPHABET.index(character) for character in beginning])
        with torch.no_grad():
            for _ in range(length):
                scores, state = self(text.unsqueeze(1), state)
                text = torch.multinomial((scores[-1, 0] / temperature).softmax(dim=0), 1)
                written += ALPHABET[int(text)]
        return written.replace("\t", _INDENT)


def _parameters_of(module: rpc.RRef[nn.Module]) -> list[rpc.RRef[nn.Parameter]]:
    """Runs where the module lives."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def drive(options: argparse.Namespace, workers: Sequence[str]) -> None:
    """Train, measure, and let the model write; runs on the trainer."""
    corpus = load()
    model = LanguageModel(workers[1], workers[-1], options.width)
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameter_references(), lr=3e-3)
    print(f"{len(corpus.training):,} characters of Python, embedding on {workers[1]}, "
          f"decoder on {workers[-1]}, backend {options.backend}", flush=True)  # fmt: skip
    losses = []
    bar = tqdm(total=options.steps, unit=" steps", disable=None)
    for step in range(1, options.steps + 1):
        text, following = corpus.batch(options.batch_size, options.length)
        with autograd_dist.context() as context:
            scores, _ = model(text)
            loss = cross_entropy(scores.flatten(0, 1), following.flatten())
            autograd_dist.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item() / math.log(2))
        bar.update()
        bar.set_postfix(bits=f"{losses[-1]:.2f}", refresh=False)
        if step % 100 == 0:
            bar.write(f"step {step}: {sum(losses[-100:]) / 100:.2f} bits per character")
    bar.close()
    _report(model, corpus, losses, options)


def _report(
    model: LanguageModel, corpus: Corpus, losses: Sequence[float], options: argparse.Namespace
) -> None:
    unseen = corpus.held_out[:20_000]
    ignorant = corpus.bits_without_context()
    print(f"held-out text: {model.bits(unseen):.2f} bits per character; {ignorant:.2f} if one "
          "knows only how frequent each character is")  # fmt: skip
    sample = model.write("\n\tdef ", length=500)
    (options.output / "sample.txt").write_text(sample)
    print(f"--- written by the model{sample}\n---", flush=True)
    drawn = pictures.figure(7, 3.5)
    axes = drawn.subplots()
    axes.plot(losses, linewidth=0.8)
    axes.axhline(ignorant, color="black", linestyle=":", label="frequencies only")
    axes.set(xlabel="step", ylabel="bits per character")
    axes.legend()
    pictures.save(drawn, options.output / "language_model.png")


def main() -> int:
    """Read the command line and run."""
    parser = taking_part.parser(__doc__, "trainer:1 server:1,service", output="getting_started")
    add = parser.add_argument
    add("--steps", type=taking_part.positive, default=1000, help="of training (%(default)s)")
    add("--batch-size", type=taking_part.positive, default=32, help="excerpts a step (%(default)s)")
    add("--length", type=taking_part.positive, default=64, help="of an excerpt (%(default)s)")
    add("--width", type=taking_part.positive, default=192, help="of the LSTM (%(default)s)")
    return taking_part.run(parser.parse_args(), taking_part.Job(drive, fewest=2, most=3))


if __name__ == "__main__":
    sys.exit(main())
