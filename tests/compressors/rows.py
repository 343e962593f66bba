"""How far rows of a table move that never have a gradient: python rows.py 4bit topk:ratio=12 1bit signsgd"""

import sys

import numpy as np
import torch

from gradwire.compressors import LayerRule, ModelCompressor, TensorSpec, decode

torch.manual_seed(0)
shape, used = (1000, 32), 99
for name in sys.argv[1:]:
    worker = ModelCompressor([TensorSpec(name="table", shape=shape)], name, LayerRule(), 1, 0)
    table = torch.nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.AdamW([table], lr=0.003, weight_decay=0)
    for version in range(400):
        gradient = torch.zeros(shape)
        gradient[:used] = 1e-3 * (torch.randn(used, 32) + 0.2)
        payloads = worker.compress([gradient], 16, version=version)
        table.grad = torch.from_numpy(np.concatenate([decode(each) for each in payloads])).view(shape)
        optimizer.step()
    print(name, f"without gradient {table[used:].abs().max():.5f}, others {table[:used].abs().mean():.3f}")
