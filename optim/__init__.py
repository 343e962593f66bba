"""The optimizers of the server and of workers. A script uses `muon`; the rest is internal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["muon"]


def muon(
    model: nn.Module, lr: float, groups: Iterable[Mapping[str, Any]] = (), **options: float
) -> torch.optim.Optimizer:
    """Return an optimizer that steps a model's matrices by Muon and its other parameters by AdamW.

    Embeddings, tables of positions, the output layer, norms and biases are AdamW's. It fits `Job.attach`
    where workers take the steps: in mode `local`, or with steps="local".

    Args:
        model: model to train.
        lr: learning rate of both, before any schedule. Steps have the size of AdamW's, and a rate that suits
            AdamW is a start. With local steps a rate eight times as high was better.
        groups: groups of parameters with options of their own, as for torch's optimizers. The key `params`
            holds the parameters, and `lr` a rate. The key `optimizer` is "muon" or "adamw", in place of the
            default rule. The key `split` is the number of matrices that a parameter holds one above the
            other.
        options: options of `--optimizer muon`: momentum (0.95), weight_decay (0.1), beta1 (0.9), beta2
            (0.999), eps (1e-8) and split (1).

    Raises:
        TypeError: `model` is no module.
        ValueError: an option is unknown or has an invalid value, or Muon cannot step a parameter.

    Example:
        >>> optimizer = gradwire.optim.muon(model, lr=0.02, groups=[{"params": [model.bias], "lr": 0.001}])
        >>> with gradwire.connect() as job:
        ...     model, optimizer = job.attach(model, optimizer, steps="local")
    """
    if not hasattr(model, "named_parameters"):
        raise TypeError(f"model: expected a torch.nn.Module, not its parameters, got {type(model).__name__}")
    from .combined import MuonWithAdamW
    from .matrices import declared, described
    from .optimizer import check_learning_rate, overridden
    from .steps import Muon

    check_learning_rate(lr)
    divided = declared(model, groups, overridden(Muon(), options))
    logging.getLogger("gradwire.worker").info("optimizer muon: %s", described(model, divided))
    return MuonWithAdamW(model, divided, lr)
