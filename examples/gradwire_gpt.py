"""The script plain_gpt.py as a worker of Gradwire: a small GPT on the Python standard library's sources.

    gc-server --script --min-workers 4 --batch-size 32 --epochs 0 --max-steps 400
    GC_SERVER=localhost python gradwire_gpt.py --steps 400 --batch-size 32         # start it four times

docs/how-to/scripts.md shows the lines in which the two scripts differ.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import gradwire

CONTEXT, LAYERS, WIDTH, HEADS = 64, 2, 128, 4


class Block(nn.Module):
    """One transformer block: causal attention, then two linear layers, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).flatten(2))
        return torch.add(x, self.narrow(functional.gelu(self.wide(self.norm2(x)))))


class Gpt(nn.Module):
    """A GPT over bytes: `forward` maps text (batch, length) to scores (batch, length, 256) of each next
    byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.positions.weight[: text.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.embedding.weight)  # tied weights


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross entropy of predicting each next byte of a batch (samples, CONTEXT + 1)."""
    scores: Tensor = model(batch[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    """Train as one worker of a job and print losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--data", type=Path, help="text file to train on; default: the standard library's sources"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--every", type=int, default=100, help="number of steps between two lines of losses")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    library = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    text = b"".join(path.read_bytes() for path in ([args.data] if args.data else library))[:1_000_000]
    windows = torch.tensor(list(text)).unfold(0, CONTEXT + 1, CONTEXT)  # each overlaps the next by one byte
    train, validation = windows.tensor_split([len(windows) * 19 // 20])
    loader = DataLoader(TensorDataset(train), args.batch_size, shuffle=True, drop_last=True)
    checks = DataLoader(TensorDataset(validation), args.batch_size)

    model = Gpt().to(device)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]  # biases and norms
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    job = gradwire.connect()
    model, optimizer = job.attach(model, optimizer, clip_norm=1.0)
    warmup, whole = max(1, args.steps // 20), math.pi / args.steps
    factors = LambdaLR(optimizer, lambda at: min((at + 1) / warmup, 0.55 + 0.45 * math.cos(whole * at)))

    step = 0
    for _ in job.epochs():
        for (batch,) in job.batches(loader.dataset):
            loss = loss_of(model, batch.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            factors.step()
            step += 1
            if step % args.every == 0 or step == args.steps:
                with torch.no_grad():
                    losses = [loss_of(model, batch.to(device)).item() for (batch,) in checks]
                print(f"step {step}: loss {loss.item():.4f}, validation loss {sum(losses) / len(losses):.4f}")
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
