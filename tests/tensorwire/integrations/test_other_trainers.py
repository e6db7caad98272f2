"""Trainers made from the Trainer: TRL's, with adapters, and for sequences that are generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from transformers import (  # noqa: E402
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
)

from tensorwire.integrations.transformers import ParameterServerCallback  # noqa: E402
from tests.tensorwire.integrations.tiny import (  # noqa: E402
    PLAIN,
    SERVERS,
    beside_servers,
    model,
    require_same,
    tokenizer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(200),
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent anywhere, and no thread started for it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


def fine_tune(folder: Path, callbacks: list[Any]) -> Trainer:
    """Adapters of a tiny GPT, by TRL's Trainer."""
    torch.manual_seed(3)
    args = trl.SFTConfig(
        **{**PLAIN, "output_dir": str(folder), "max_length": 6, "bf16": False},
        eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    texts = datasets.Dataset.from_dict({"text": [chr(97 + n) * (n % 5 + 2) for n in range(20)]})
    trainer = trl.SFTTrainer(
        model=model(),
        args=args,
        train_dataset=texts,
        eval_dataset=texts.select(range(4)),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True),
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


def test_of_a_model_with_adapters_only_these_travel(tmp_path: Path) -> None:
    local = fine_tune(tmp_path / "local", [])

    def go() -> None:
        callback = ParameterServerCallback(SERVERS)
        trainer = fine_tune(tmp_path / "servers", [callback])
        require_same(local, trainer)
        assert callback.optimizer is not None
        assert callback.optimizer.group is not None
        trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
        assert all("lora" in name for name in trained)
        assert callback.optimizer.group.parameters == list(trained.values())
        best = [each.detach().clone() for each in trained.values()]
        for each in trained.values():
            torch.nn.init.zeros_(each)
        callback.optimizer.reload()
        assert all(map(torch.equal, best, trained.values()))

    beside_servers(go)


class Doubles(Dataset[dict[str, torch.Tensor]]):
    """A number, and the same number twice."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number = torch.tensor([4 + index, 2])
        return {"input_ids": number, "labels": number[[0, 0, 1]]}


def translate(folder: Path, callbacks: list[Any]) -> tuple[Trainer, list[Any]]:
    """A tiny BART, which generates at each evaluation."""
    torch.manual_seed(4)
    config = BartConfig(
        vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, forced_eos_token_id=2,
        max_position_embeddings=16,
    )  # fmt: skip
    args = Seq2SeqTrainingArguments(
        **{**PLAIN, "output_dir": str(folder), "save_strategy": "no"},
        eval_strategy="steps", eval_steps=1, predict_with_generate=True, generation_max_length=5,
    )  # fmt: skip
    generated: list[Any] = []

    def look(found: Any) -> dict[str, float]:
        generated.append(found.predictions.tolist())
        return {}

    trainer = Seq2SeqTrainer(
        model=BartForConditionalGeneration(config),
        args=args,
        train_dataset=Doubles(),
        eval_dataset=Doubles(),
        compute_metrics=look,
        callbacks=callbacks,
    )
    trainer.train()
    return trainer, generated


def test_sequences_generated_during_evaluation_are_those_of_a_local_run(tmp_path: Path) -> None:
    local, generated = translate(tmp_path, [])
    trainer, found = beside_servers(lambda: translate(tmp_path, [ParameterServerCallback(SERVERS)]))
    require_same(local, trainer)
    assert found == generated
    assert len(found) == 3
