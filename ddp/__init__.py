"""Gradwire's compressors as a hook of torch's DistributedDataParallel (DDP), without a server.

    model = torch.nn.parallel.DistributedDataParallel(network)
    gradwire.ddp.register(model, "4bit", optimizer=optimizer)

Every rank compresses its gradients as a worker of Gradwire does, sends the payloads to all ranks, and
averages the gradients that it decodes. The class HookState documents the order of these steps.
docs/how-to/ddp.md says when compression makes DDP faster.
"""

from __future__ import annotations

from ..compressors import LayerRule as LayerRule
from .exchange import RanksDisagree as RanksDisagree
from .hook import HookState as HookState
from .hook import hook as hook
from .lost import RankLost as RankLost
from .registering import Options as Options
from .registering import register as register

state = HookState  # the name that scripts use
