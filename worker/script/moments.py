"""The state of a script's optimizer: as torch's `state_dict` has it, and as it travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...optim.steps import COUNT
from ...proto.moments import Moments
from ..session.replica import Replica
from .terms import ScriptError


def moments_of(state: Mapping[torch.Tensor, Mapping[str, Any]], replica: Replica) -> Moments:
    """Return the state of an optimizer of this process, for the server's to continue from.

    Args:
        state: `state` of the optimizer, by parameter.
        replica: the parameters as the job has them.

    Raises:
        ScriptError: a tensor that has another shape than its parameter.
    """
    found: dict[int, dict[str, npt.NDArray[np.float32]]] = {}
    for number, parameter in enumerate(replica.parameters):
        of_parameter: dict[str, npt.NDArray[np.float32]] = {}
        for name, value in state.get(parameter, {}).items():
            if value is None:
                continue
            tensor = torch.as_tensor(value, dtype=torch.float32)
            if name != COUNT and tensor.shape != parameter.shape:
                raise ScriptError(
                    f"optimizer.load_state_dict: {name} of {replica.manifest.specs[number].name!r} has shape "
                    f"{tuple(tensor.shape)}, expected {tuple(parameter.shape)}: it is of another model"
                )
            of_parameter[name] = tensor.detach().cpu().reshape(-1).numpy()
        if of_parameter:
            found[number] = of_parameter
    return found


def state_of(moments: Moments, replica: Replica) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the state of the server's optimizer by parameter, as torch's optimizer would have it."""
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for number, of_parameter in moments.items():
        parameter = replica.parameters[number]
        found[parameter] = {
            name: torch.tensor(float(values[0]))
            if name == COUNT
            else torch.from_numpy(values).view(parameter.shape).to(parameter.device, parameter.dtype)
            for name, values in of_parameter.items()
        }
    return found
