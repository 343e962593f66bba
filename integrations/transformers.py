"""Transformers' Trainer with compressed gradients, and as a worker of a job.

trainer.add_callback(gradwire.integrations.transformers.DDPCallback(trainer, "4bit"))
trainer.add_callback(gradwire.integrations.transformers.JobCallback(trainer, gradwire.connect()))
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Unpack

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..ddp import HookState, Options
from ..worker.script.job import Job
from ..worker.script.terms import ScriptError, Steps
from .hooks import read, registered, write
from .jobs import ONCE, JobLoader, attach, follow


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


class JobCallback(TrainerCallback):
    """Makes the Trainer's process a worker of a job.

    The job divides the training data; its rank 0 writes checkpoints and logs. The job gets the numbers of
    each evaluation.
    """

    def __init__(self, trainer: Trainer, job: Job, *, steps: Steps = "server") -> None:
        """
        Args:
            trainer: trainer that the callback is added to.
            job: job of this process, from `gradwire.connect`.
            steps: as for `Job.attach`.

        Raises:
            ScriptError: the arguments ask for something that a job cannot do.
        """
        of_trainer: Any = trainer  # annotated only in part
        self._trainer = of_trainer
        self._job = job
        self._steps: Steps = steps
        self._loader: JobLoader | None = None
        arguments: Any = self._trainer.args
        refused = {
            "processes of torchrun": arguments.world_size > 1,
            "several GPUs in a process": arguments.n_gpu > 1,
            "load_best_model_at_end": arguments.load_best_model_at_end,
            "auto_find_batch_size": arguments.auto_find_batch_size,
        }
        if found := [name for name, given in refused.items() if given]:
            raise ScriptError(
                f"JobCallback: {', '.join(found)}: a job cannot do so. Start each worker alone, as gc-run "
                "does, with one device (CUDA_VISIBLE_DEVICES); gc-server --keep keeps the best version"
            )
        arguments.distributed_state.process_index = job.rank  # so that one rank writes and logs
        self._make_loader = of_trainer.get_train_dataloader
        self._make_optimizer = of_trainer.create_optimizer
        self._step = of_trainer.training_step
        of_trainer.get_train_dataloader = self._batches
        of_trainer.create_optimizer = self._attached
        of_trainer.training_step = self._logged

    def _batches(self) -> Any:
        arguments = self._trainer.args
        if self._loader is not None:
            raise ScriptError(f"JobCallback: {ONCE}")
        self._loader = JobLoader(
            self._job,
            self._make_loader(),
            epochs=None if arguments.max_steps > 0 else math.ceil(arguments.num_train_epochs),
            accumulate=arguments.gradient_accumulation_steps,
            max_steps=arguments.max_steps,
        )
        return self._loader.batches

    def _attached(self, model: Any = None) -> Any:
        trainer, arguments = self._trainer, self._trainer.args
        trainer.optimizer, clips = attach(
            self._job,
            trainer.model,
            self._make_optimizer(model),
            clip_norm=arguments.max_grad_norm or 0.0,
            scaler=trainer.accelerator.scaler,
            steps=self._steps,
            # The Trainer takes all batches of a step before it computes the first.
            overlap="off" if arguments.gradient_accumulation_steps > 1 else None,
        )
        if clips:
            arguments.max_grad_norm = 0.0
        return trainer.optimizer

    def _logged(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._step(*args, **kwargs)
        self._job.log(loss=loss * self._trainer.current_gradient_accumulation_steps)
        return loss

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Follow the Trainer's scheduler.

        Raises:
            ScriptError: the scheduler follows a metric, or the Trainer continues from a checkpoint.
        """
        if state.global_step:
            raise ScriptError(
                "JobCallback: train(resume_from_checkpoint=...) would repeat what the job has trained; start "
                "gc-server with --state, whose job continues by itself"
            )
        follow(self._job, kwargs["lr_scheduler"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the job's buffers before an evaluation."""
        if self._loader is not None and control.should_evaluate:
            self._loader.end_epoch()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the job's buffers before an evaluation."""
        if self._loader is not None:
            self._loader.end_epoch()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the evaluation's numbers."""
        if self._loader is not None:
            of_speed = ("epoch", "_runtime", "_per_second")
            numbers = {
                name: kwargs["metrics"][name] for name in kwargs["metrics"] if not name.endswith(of_speed)
            }
            self._loader.evaluated(numbers)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the job."""
        if self._loader is not None:
            self._loader.finish()
