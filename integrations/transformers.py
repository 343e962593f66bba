"""Transformers' Trainer with compressed gradients.

trainer.add_callback(gradwire.integrations.transformers.DDPCallback(trainer, "4bit"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..ddp import HookState, Options
from .hooks import read, registered, write


class DDPCallback(TrainerCallback):
    """Registers the hook on the model that the Trainer wraps. Each rank's residuals are saved in the
    Trainer's checkpoints, in `gradwire-RANK.pt`, and loaded with them.

    Attributes:
        hook_state: state of the hook; None before `train`, and in a job of one process.
    """

    def __init__(self, trainer: Trainer, compressor: str = "4bit", **options: Unpack[Options]) -> None:
        """
        Args:
            trainer: trainer that the callback is added to.
            compressor: `name[:key=value,...]`, as for `gradwire.ddp.state`, which has the other keywords,
                too.
        """
        self.hook_state: HookState | None = None
        self._compressor, self._options = compressor, options
        self._trainer: Any = trainer  # annotated only in part
        self._model: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register the hook, once for each model; continue from a checkpoint's residuals.

        Raises:
            ScriptError: the arguments say fp16.
        """
        if self._model is not self._trainer.model_wrapped:
            self._model = self._trainer.model_wrapped
            self.hook_state = registered(
                self._model,
                [kwargs["optimizer"]],
                self._compressor,
                ranks=self._trainer.args.world_size,
                scaler=self._trainer.accelerator.scaler,
                **self._options,
            )
        if self.hook_state is not None and state.global_step:
            read(self.hook_state, self._file(args, state))

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the hook's state the epoch, for the warm-up of sparsifiers."""
        if self.hook_state is not None:
            self.hook_state.epoch = int(state.epoch or 0)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write this rank's residuals into the checkpoint."""
        if self.hook_state is not None:
            write(self.hook_state, self._file(args, state))

    def _file(self, args: TrainingArguments, state: TrainerState) -> Path:
        folder = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        return Path(args.output_dir or ".") / folder / f"gradwire-{args.process_index}.pt"
