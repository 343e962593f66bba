"""A GAN in Lightning's manual optimization, whose two optimizers step on each batch, with DDP on two ranks.

`python two_optimizers.py` does what the strategy's refusal names, and says whether the parameters are those
of Lightning's own DDP.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

import gradwire
from gradwire.integrations.lightning import DDPStrategy
from gradwire.tests.integrations.programs.rows import Rows


class Gan(pl.LightningModule):
    def __init__(self, compressor: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 20), nn.Linear(20, 1)
        self.compressor, self.steps = compressor, 0

    def on_train_start(self) -> None:
        if self.compressor:
            wrapped: Any = self.trainer.strategy.model
            self.state = gradwire.ddp.register(wrapped, self.compressor)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        optimizers: Any = self.optimizers()
        made = self.generator(torch.ones(len(batch["x"]), 4))
        for optimizer, fakes in ((optimizers[1], made.detach()), (optimizers[0], made)):
            self.toggle_optimizer(optimizer)
            real = softplus(-self.critic(batch["x"])) if optimizer is optimizers[1] else 0
            sign = 1 if optimizer is optimizers[1] else -1
            optimizer.zero_grad()
            self.manual_backward((softplus(sign * self.critic(fakes)) + real).mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters(), lr=0.01) for each in (self.generator, self.critic)]


def train(compressor: str, strategy: Any) -> torch.Tensor:
    model = Gan(compressor)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Rows(16), batch_size=4))
    return torch.cat([each.detach().flatten() for each in model.parameters()])


warnings.simplefilter("ignore")
own = "ddp_find_unused_parameters_true"
same = torch.equal(train("", own), train("none", own))
print(f"the same as Lightning's DDP: {same}", file=sys.stderr)
try:
    train("", DDPStrategy("none", find_unused_parameters=True))
except gradwire.ScriptError as error:
    print(f"refused: {error}", file=sys.stderr)
