"""An example of a training script in a job: digits with a small network. Variables GC_* hold its options."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import gradwire

with gradwire.connect() as job:
    digits: Any = load_digits()  # pyright: ignore[reportUnknownVariableType]
    dataset = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in job.epochs():
        for inputs, targets in job.batches(dataset):
            loss = functional.cross_entropy(model(inputs), targets)
            job.log(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
