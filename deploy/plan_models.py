"""Models of gc-plan as tensors: a known name, a safetensors file, or a function that makes the model."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..common.plugins import imported
from ..common.spec import SpecError
from ..planning import models
from ..planning.models import ModelTensor, Shape

FILE = ".safetensors"
LONGEST_HEADER_BYTES = 100_000_000  # the format's own limit


def model_tensors(model: str) -> list[ModelTensor]:
    """Return the parameter tensors of a model, in the order of its definition.

    Args:
        model: name that `planning.models` knows, `NxSIZE`, path of a safetensors file, or MODULE:FUNCTION
            for a function without arguments that returns a torch.nn.Module. The working directory is
            searched for the module first.

    Raises:
        SpecError: there is no such model, or it has no parameters.
    """
    if model.endswith(FILE):
        return _own(model, _shapes_in(Path(model)))
    if ":" in model:
        return _own(model, _shapes_made_by(model))
    try:
        return models.tensors(model)
    except ValueError as error:
        raise SpecError(f"--{error}, a {FILE} file, or MODULE:FUNCTION") from None


def _own(model: str, named: Iterable[tuple[str, Sequence[int]]]) -> list[ModelTensor]:
    """Return the tensors of a user's model. Each element of a matrix counts as one multiplication."""
    shapes: list[tuple[str, Shape]] = [(name, tuple(shape)) for name, shape in named]
    found = [ModelTensor(name, shape, int(len(shape) > 1)) for name, shape in shapes]
    if not any(tensor.elements for tensor in found):
        raise SpecError(f"--model {model}: expected parameters, found none")
    if not any(tensor.multiplications for tensor in found):  # vectors alone: they share the computation
        found = [ModelTensor(name, shape, 1) for name, shape in shapes]
    return found


def _shapes_in(path: Path) -> list[tuple[str, list[int]]]:
    """Return name and shape of each floating-point tensor of a safetensors file. Its values are not read."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > LONGEST_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
        tensors = [(name, each) for name, each in header.items() if name != "__metadata__"]
        placed = sorted(tensors, key=lambda item: item[1]["data_offsets"])
        return [(name, each["shape"]) for name, each in placed if "F" in each["dtype"]]
    except OSError as error:
        raise SpecError(f"--model {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise SpecError(f"--model {path}: expected a safetensors file, got {error}") from None


def _shapes_made_by(model: str) -> list[tuple[str, Sequence[int]]]:
    """Return name and shape of each parameter of the module that a function returns, on no device."""
    import torch  # takes seconds, and only this form needs it

    module, _, name = model.partition(":")
    try:
        function: Any = imported(module, name)
        with torch.device("meta"):  # shapes alone: a large model needs no memory
            made = function()
        return [(name, each.shape) for name, each in made.named_parameters() if each.requires_grad]
    except SpecError as error:
        raise SpecError(f"--model {model}: {error}") from None
    except (Exception, SystemExit) as error:  # anything that a user's code raises
        raised = f"{type(error).__name__}: {error}"
        raise SpecError(
            f"--model {model}: expected a function without arguments that returns a torch.nn.Module and runs "
            f"on torch's meta device; {raised}"
        ) from None
