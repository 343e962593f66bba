"""Digits in Transformers' Trainer: a small vision transformer, made at random.

    torchrun --nproc-per-node 2 examples/transformers_digits.py
    torchrun --nproc-per-node 2 examples/transformers_digits.py --form plain

    gc-run --script "python examples/transformers_digits.py --form job" \
        --workers 2 --epochs 10 --batch-size 16

Gradwire adds the lines that end in `# +`, or `# + job`. docs/how-to/frameworks.md has the page.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

import gradwire  # + job
from gradwire.integrations.transformers import (
    DDPCallback,  # +
    JobCallback,  # + job
)


def accuracy_of(predicted: Any) -> dict[str, float]:
    """Return the share of right answers, for the Trainer."""
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def main() -> None:
    """Train, and print the accuracy on samples that were not trained on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=["plain", "ddp", "job"], default="ddp")
    parser.add_argument("--compressor", default="4bit")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default="runs/transformers")
    given = parser.parse_args()

    set_seed(given.seed)
    digits = cast(Any, load_digits())
    images, labels = digits.data, digits.target
    pixels = torch.tensor(images / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    samples: Any = [{"pixel_values": x, "labels": int(y)} for x, y in zip(pixels, labels, strict=True)]
    shuffled = torch.Generator().manual_seed(0)
    train, valid = torch.utils.data.random_split(samples, [1437, 360], generator=shuffled)
    sizes: Any = dict(  # noqa: C408
        image_size=8, patch_size=4, num_channels=1, hidden_size=32, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=64, num_labels=10, hidden_dropout_prob=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    backend = None if given.form == "job" else "gloo"
    arguments = TrainingArguments(
        given.folder, num_train_epochs=given.epochs, per_device_train_batch_size=16, learning_rate=3e-3,
        use_cpu=True, ddp_backend=backend, report_to=[], save_strategy="no",
        disable_tqdm=True, seed=given.seed, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(
        ViTForImageClassification(ViTConfig(**sizes)), arguments, train_dataset=train, eval_dataset=valid,
        compute_metrics=accuracy_of,
    )  # fmt: skip
    if given.form == "ddp":
        trainer.add_callback(DDPCallback(trainer, given.compressor))  # +
    elif given.form == "job":
        trainer.add_callback(JobCallback(trainer, gradwire.connect()))  # + job
    trainer.train()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {found['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
