"""The worker's copy of the parameters, kept bit for bit like every other worker's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ...compressors import Payload, add_update, put_update
from ...proto.manifest import DTYPE, Manifest
from ...proto.messages import Content, Tensor, Update


class ModelError(ValueError):
    """A model that Gradwire cannot train; the message says what to change."""


class Replica:
    """A model's trainable parameters as the manifest orders them: by `named_parameters`."""

    def __init__(self, model: nn.Module, train_samples: int) -> None:
        """Raises ModelError for parameters that are not float32, or none at all."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ModelError("the model has no parameter that requires a gradient")
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                raise ModelError(
                    f"parameter {name!r}: expected {DTYPE}, got {parameter.dtype}; "
                    "convert the model with .float()"
                )
        self.model = model
        self.parameters = [parameter for _, parameter in named]
        self._tensors: list[torch.Tensor] = [*self.parameters]
        self.manifest = Manifest(
            tuple(Tensor(name=name, shape=tuple(p.shape), dtype=DTYPE) for name, p in named), train_samples
        )
        self.version: int | None = None

    def include(self, state: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Make named tensors that are no parameters a part of the replica and its manifest."""
        self._tensors += [tensor for _, tensor in state]
        added = [Tensor(name=name, shape=tuple(t.shape), dtype=DTYPE, state=True) for name, t in state]
        self.manifest = Manifest((*self.manifest.tensors, *added), self.manifest.train_samples)

    def values(self) -> list[npt.NDArray[np.uint8]]:
        """Every tensor as flat float32 bytes."""
        return [p.detach().cpu().contiguous().view(-1).numpy().view(np.uint8) for p in self._tensors]

    def apply(self, update: Update, payloads: Sequence[Payload]) -> None:
        """Take in an update. One that has been applied before is passed over."""
        if update.content is not Content.VALUES and update.version != (self.version or 0) + 1:
            return
        with torch.no_grad():
            for tensor, payload in zip(update.tensors, payloads, strict=True):
                take = add_update if update.content is Content.DELTA else put_update
                take(payload, self._tensors[tensor.tensor])
        self.version = update.version

    def gradients(self) -> list[torch.Tensor]:
        """Where the parameters are; zeros where the loss did not reach one."""
        return [
            torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense().to(torch.float32)
            for p in self.parameters
        ]
