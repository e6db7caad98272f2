"""A causal language model of Hugging Face's in three stages, one of which is killed on the way.

The model is a small Llama with random weights. It is cut where modules with certain names begin;
nothing about it is written for pipelines. ``backups=1`` keeps each stage's state in another
worker's memory too, so training goes on when the second stage's worker dies, with the losses of a
run in which nobody dies.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tensorwire.pipeline import Pipeline
from tutorials import pictures, taking_part
from tutorials.getting_started.language_model import ALPHABET, Corpus, load
from tutorials.pipeline.model import loss
from tutorials.pipeline.train import kill


class Scores(nn.Module):
    """The model with tensors alone going in and out, as a pipeline needs it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of each next token, of shape (texts, length, characters)."""
        scores: Tensor = self.model(tokens, use_cache=False).logits
        return scores


def language_model(characters: int, length: int, width: int) -> Scores:
    """A Llama of three layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return Scores(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=characters,
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=length,
            )
        )
    )


def batches(corpus: Corpus, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Texts, and what follows each character."""
    for step in range(options.steps):
        torch.manual_seed(options.seed * 1_000_003 + step)
        excerpts = torch.stack(corpus.batch(options.batch_size, options.length)).transpose(1, 2)
        yield excerpts[0], excerpts[1]


def drive(options: argparse.Namespace, workers: Sequence[str]) -> None:
    """Train and draw; runs on the main worker."""
    corpus = load()
    torch.manual_seed(options.seed)
    model = language_model(len(ALPHABET), options.length, options.width)
    with Pipeline.split(
        model,
        at=["model.model.layers.1", "model.model.layers.2"],
        workers=workers[1:4],
        example=torch.zeros(
            options.batch_size // options.micro_batches, options.length, dtype=torch.long
        ),
        microbatches=options.micro_batches,
        loss=loss,
        backups=1,
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=2e-3)
        bits = []
        for batch in pipe.batches(batches(corpus, options)):
            bits.append(pipe.train_step(batch.x, target=batch.y).item() / math.log(2))
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if pipe.steps == options.steps // 2:
                kill("stage:1")
            if pipe.steps in (1, options.steps):
                print(f"step {pipe.steps}: {bits[-1]:.2f} bits per character; stages on "
                      f"{', '.join(pipe.workers)}", flush=True)  # fmt: skip
    drawn = pictures.figure(7, 3.5)
    axes = drawn.subplots()
    axes.plot(bits, linewidth=0.8)
    axes.axvline(options.steps // 2, color="tab:red", linewidth=0.8, label="stage:1 is killed")
    axes.set(xlabel="step", ylabel="bits per character")
    axes.legend()
    pictures.save(drawn, options.output / "hugging_face.png")


def main() -> int:
    """Read the command line and run."""
    roles = "main:1 stage:3,service,max_restarts=1"
    parser = taking_part.parser(__doc__, roles, output="pipeline")
    add = parser.add_argument
    add("--steps", type=taking_part.positive, default=200, help="of training (%(default)s)")
    add("--batch-size", type=taking_part.positive, default=16, help="excerpts a step (%(default)s)")
    add("--micro-batches", type=taking_part.positive, default=4, help="of a batch (%(default)s)")
    add("--length", type=taking_part.positive, default=64, help="of an excerpt (%(default)s)")
    add("--width", type=taking_part.positive, default=64, help="of the vectors (%(default)s)")
    return taking_part.run(parser.parse_args(), taking_part.Job(drive, fewest=4))


if __name__ == "__main__":
    sys.exit(main())
