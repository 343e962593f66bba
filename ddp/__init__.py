"""The compressors inside torch's DistributedDataParallel, without a server.

    model = torch.nn.parallel.DistributedDataParallel(network)
    model.register_comm_hook(gradwire.ddp.state("4bit", optimizer=optimizer), gradwire.ddp.hook)

Every rank compresses its gradients as a worker of Gradwire does, the payloads go to all ranks, and each rank
averages what it decodes. `HookState` says in which order, docs/ddp.md when it pays.
"""

from __future__ import annotations

from ..compressors import LayerRule as LayerRule
from .exchange import RanksDisagree as RanksDisagree
from .hook import HookState as HookState
from .hook import hook as hook

state = HookState  # as the second line above reads
