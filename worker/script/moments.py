"""Convert the state of a script's optimizer between torch's `state_dict` and the form that is sent."""

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
    """Return the state of this process's optimizer in the form in which it is uploaded to the server's
    optimizer.

    Returns:
        Arrays, float32 and flat, by index of the parameter and torch's name, such as "exp_avg".

    Raises:
        ScriptError: a state tensor has another shape than its parameter.
    """
    found: dict[int, dict[str, npt.NDArray[np.float32]]] = {}
    for number, parameter in enumerate(replica.parameters):
        of_parameter: dict[str, npt.NDArray[np.float32]] = {}
        for name, value in state.get(parameter, {}).items():
            if value is None:
                continue
            tensor = torch.as_tensor(value, dtype=torch.float32, device="cpu")
            if name != COUNT and tensor.shape != parameter.shape:
                raise ScriptError(
                    f"optimizer.load_state_dict: {name} of {replica.manifest.specs[number].name!r} has shape "
                    f"{tuple(tensor.shape)}, expected {tuple(parameter.shape)}: load the state of this model"
                )
            of_parameter[name] = tensor.detach().reshape(-1).numpy()
        if of_parameter:
            found[number] = of_parameter
    return found


def state_of(moments: Moments, replica: Replica) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the downloaded state of the server's optimizer in the form of a torch optimizer's `state`."""
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for number, of_parameter in moments.items():
        parameter = replica.parameters[number]
        found[parameter] = {
            name: torch.tensor(float(values[0]), dtype=torch.float32, device="cpu")
            if name == COUNT
            else torch.from_numpy(values).view(parameter.shape).to(parameter.device, parameter.dtype)
            for name, values in of_parameter.items()
        }
    return found
