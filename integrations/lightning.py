"""Lightning's DDP with compressed gradients, on CPUs and GPUs.

    trainer = Trainer(strategy=gradwire.integrations.lightning.DDPStrategy("4bit"))

Lightning's own `ddp_comm_hook` is registered on GPUs alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ..ddp import HookState, Options
from .hooks import read, registered, write


class DDPStrategy(LightningDDPStrategy):
    """Lightning's DDPStrategy whose gradients travel compressed. Each rank's residuals are saved beside the
    checkpoint, in `CHECKPOINT.gradwire-RANK`, and loaded with it.

    Attributes:
        hook_state: state of the hook; None before `fit`.
    """

    def __init__(self, compressor: str = "4bit", **options: Any) -> None:
        """
        Args:
            compressor: `name[:key=value,...]`, as for `gradwire.ddp.state`.
            options: `rule`, `seed`, `samples` and the like of `gradwire.ddp.state`; all others are those of
                Lightning's strategy.
        """
        own = Options.__optional_keys__ - {"optimizer", "process_group"}
        self._own: Any = {name: options.pop(name) for name in own & options.keys()}
        super().__init__(**options)
        self.hook_state: HookState | None = None
        self._compressor, self._resumed = compressor, ""

    def setup(self, trainer: pl.Trainer) -> None:
        """Wrap the model as Lightning does, and register the hook.

        Raises:
            ScriptError: the script has several optimizers, or precision "16-mixed".
        """
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.model is not None
        self.hook_state = registered(
            self.model,
            self.optimizers,
            self._compressor,
            ranks=self.world_size,
            scaler=getattr(self.precision_plugin, "scaler", None),
            **self._own,
        )
        if self.hook_state is not None and self._resumed:
            read(self.hook_state, self._file(self._resumed))
        self._resumed = ""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell the state the epoch, for the warm-up of sparsifiers."""
        super().on_train_batch_start(batch, batch_idx)
        if self.hook_state is not None:
            self.hook_state.epoch = self.lightning_module.current_epoch  # type: ignore[union-attr]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save Lightning's checkpoint, and each rank's residuals beside it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.hook_state is not None:
            write(self.hook_state, self._file(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load Lightning's checkpoint; `setup` loads this rank's residuals."""
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:  # type: ignore[union-attr]
            self._resumed = os.path.realpath(checkpoint_path)  # of a link to the last checkpoint, its target
        return super().load_checkpoint(checkpoint_path, weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove Lightning's checkpoint, and this rank's residuals."""
        super().remove_checkpoint(filepath)
        self._file(filepath).unlink(missing_ok=True)

    def _file(self, checkpoint: Any) -> Path:
        return Path(f"{checkpoint}.gradwire-{self.global_rank}")
