"""Divides a model's parameters between Muon and AdamW, by a rule and by declared groups.

Muon is meant for matrices that map one hidden state to another. AdamW steps the other parameters, at the same
rate. The rule, for each parameter:

    | parameter | stepped by |
    |---|---|
    | fewer than two dimensions, or a matrix of one row or column | AdamW |
    | a parameter of an embedding, also where an output layer shares it | AdamW |
    | a name with pos, embed or token: tables of positions, class tokens | AdamW |
    | weight of the output layer | AdamW |
    | weight of a convolution, of any dimensions: a row for each output channel | Muon |
    | `in_proj_weight` of torch's attention | Muon, as three matrices: query, key and value |
    | other parameters of two dimensions | Muon |
    | other parameters of more dimensions | AdamW |

The output layer is the last linear or convolutional layer in the order of registration. There are two
exceptions, which are signs that the embedding's weight computes the output: the layer belongs to a block
whose class occurs more than once, or its outputs are as wide as an embedding. Layers called head, lm_head,
classifier or logits are output layers, too.

Weight decay acts on parameters of two and more dimensions, unless a declared group has its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from .optimizer import check_learning_rate, number, overridden
from .steps import AdamW, Muon, OptimizerOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

_TABLE = re.compile(r"(^|_)(pos|position)|embed|token", re.IGNORECASE)
_OUTPUTS = frozenset({"head", "lm_head", "classifier", "logits"})


@dataclass(frozen=True, slots=True)
class Declared:
    """Parameters of a model that are stepped alike.

    Attributes:
        learning_rate: learning rate before the job's schedule; None for the job's.
        names: names of the parameters.
    """

    options: OptimizerOptions
    learning_rate: float | None
    names: tuple[str, ...]


def matrices(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that Muon steps by the rule at the head of this file."""
    from torch import nn

    convolutions = {
        id(each.weight) for each in model.modules() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    excluded = embeddings | {id(layer.weight) for layer in _output_layers(model)}
    found: set[str] = set()
    for name, parameter in model.named_parameters():
        if id(parameter) in excluded or _TABLE.search(name.rpartition(".")[2]):
            continue
        rows_and_columns = parameter.dim() == 2 or (parameter.dim() > 2 and id(parameter) in convolutions)
        if rows_and_columns and 1 < parameter.shape[0] < parameter.numel():
            found.add(name)
    return frozenset(found)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules of a model by name."""
    return dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]


def _output_layers(model: nn.Module) -> list[nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d]:
    """Return the layers that compute the model's output, by the rule at the head of this file."""
    from torch import nn

    modules = _modules(model)
    layers = {
        name: each
        for name, each in modules.items()
        if isinstance(each, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    if not layers:
        return []
    found = [each for name, each in layers.items() if name.rpartition(".")[2] in _OUTPUTS]
    containers = nn.Sequential | nn.ModuleList | nn.ModuleDict
    times = Counter(type(each) for each in modules.values())
    *_, last = layers
    parts = last.split(".")
    above = [modules[".".join(parts[:depth])] for depth in range(1, len(parts))]
    in_block = any(times[type(each)] > 1 for each in above if not isinstance(each, containers))
    layer = layers[last]
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    tables = [each for each in modules.values() if isinstance(each, nn.Embedding)]
    as_wide = any(each.embedding_dim == outputs != each.num_embeddings for each in tables)
    return found if in_block or as_wide else [*found, layer]


def declared(
    model: nn.Module, given: Iterable[Mapping[str, Any]], options: OptimizerOptions
) -> list[Declared]:
    """Check a user's parameter groups, and return them with the rest of the trainable parameters.

    Trainable parameters in none of the groups form one more group, the last, with the job's options. With
    Muon, each group is divided by the rule at the head of this file. Without Muon, the keys `optimizer` and
    `split` of a group have no effect.

    Args:
        given: one mapping per group, as for `torch.optim`.
        options: options of the job's optimizer, which a group's options override.

    Returns:
        The groups; an empty list if none are given and the optimizer is not Muon.

    Raises:
        ValueError: a parameter is not the model's, or is in two groups; or an option is unknown or invalid.
            The message names the group.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[Declared] = []
    taken: dict[str, int] = {}
    for index, each in enumerate(given):
        try:
            overrides = dict(each)
            if not isinstance(options, Muon) and not _without_muon(overrides):
                continue
            members: dict[str, torch.Tensor] = {}
            for parameter in _members(overrides.pop("params", ())):
                name = names.get(id(parameter))
                if name is None:
                    shape = tuple(parameter.shape)
                    raise ValueError(
                        f"params: expected parameters of the model, got a foreign one, of shape {shape}"
                    )
                if taken.setdefault(name, index) != index:
                    raise ValueError(f"params: {name!r} is in group {taken[name]} already")
                members[name] = parameter
            rate = number("lr", overrides.pop("lr")) if "lr" in overrides else None
            if rate is not None:
                check_learning_rate(rate, "lr")
            found += (
                divided(model, members, overrides, options, rate)
                if isinstance(options, Muon)
                else [Declared(overridden(options, overrides), rate, tuple(members))]
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"parameter group {index}: {error}") from None
    left = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in taken
    }
    if isinstance(options, Muon):
        found += divided(model, left, {}, options, None)
    elif left and found:
        found.append(Declared(options, None, tuple(left)))
    return found


def _without_muon(overrides: dict[str, Any]) -> bool:
    """Remove the keys of a group that count for Muon alone; return False if no other key is left."""
    of_muon = [key for key in ("optimizer", "split") if overrides.pop(key, None) is not None]
    return not of_muon or overrides.keys() != {"params"}


def _members(given: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of a group's `params`. Raises ValueError if an element is no tensor."""
    import torch

    members = [given] if isinstance(given, torch.Tensor) else list(cast(Iterable[object], given))
    for each in members:
        if not isinstance(each, torch.Tensor):
            raise ValueError(f"params: expected parameters of the model, got a {type(each).__name__}")
    return cast(Sequence[torch.Tensor], members)


def divided(
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    overrides: Mapping[str, object],
    options: Muon,
    learning_rate: float | None,
) -> list[Declared]:
    """Divide parameters into those that Muon steps and those that AdamW steps, with and without weight decay.

    Args:
        overrides: values of options of Muon that differ from `options`. `optimizer` is "muon" or "adamw";
            without it, the rule at the head of this file decides.
        learning_rate: that before the schedule; None for the job's.

    Raises:
        ValueError: an option is unknown or has an invalid value, or Muon cannot step a parameter.
    """
    from torch import nn

    kept = dict(overrides)
    stepped_by = kept.pop("optimizer", None)
    if stepped_by not in (None, "muon", "adamw"):
        raise ValueError(f"optimizer: expected 'muon' or 'adamw', got {stepped_by!r}")
    muon = overridden(options, kept)
    assert isinstance(muon, Muon)
    chosen = matrices(model) if stepped_by is None else frozenset(parameters if stepped_by == "muon" else ())
    fused = {
        f"{name}.in_proj_weight".lstrip(".")
        for name, each in _modules(model).items()
        if isinstance(each, nn.MultiheadAttention)
    }
    names: dict[OptimizerOptions, list[str]] = {}
    for name, parameter in parameters.items():
        decays = parameter.dim() > 1 or "weight_decay" in kept
        of_this: OptimizerOptions = AdamW(
            beta1=muon.beta1,
            beta2=muon.beta2,
            eps=muon.eps,
            weight_decay=muon.weight_decay if decays else 0.0,
        )
        if name in chosen:
            if parameter.dim() < 2:
                raise ValueError(
                    f"params: muon steps matrices, and {name!r} has {parameter.dim()} dimensions"
                )
            if parameter.shape[0] % muon.split:
                raise ValueError(
                    f"split: {name!r} has {parameter.shape[0]} rows, which are no multiple of {muon.split}"
                )
            of_this = muon
            if name in fused and "split" not in kept:
                of_this = replace(muon, split=3)
        names.setdefault(of_this, []).append(name)
    return [Declared(options, learning_rate, tuple(each)) for options, each in names.items()]


def _pattern(name: str) -> str:
    """Return a parameter's name with a star in place of each number between dots."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)


def described(model: nn.Module, groups: Sequence[Declared]) -> str:
    """Return a text that tells which parameters Muon and AdamW step, with numbers in names as a star."""
    parameters = dict(model.named_parameters())
    texts: list[str] = []
    for kind, verb in ((Muon, "Muon steps"), (AdamW, "AdamW steps")):
        names = [name for each in groups if isinstance(each.options, kind) for name in each.names]
        elements = sum(parameters[name].numel() for name in names)
        times = Counter(map(_pattern, names))
        patterns = dict.fromkeys(_pattern(name) if times[_pattern(name)] > 1 else name for name in names)
        text = f"{verb} {len(names)} parameters of {elements} elements"
        texts.append(f"{text} ({', '.join(patterns)})" if names else text)
    return "; ".join(texts)
