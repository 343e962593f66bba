"""Lightning's DDP with compressed gradients, on CPUs and GPUs, and Lightning as a worker of a job.

    trainer = Trainer(strategy=gradwire.integrations.lightning.DDPStrategy("4bit"))
    trainer = Trainer(strategy=gradwire.integrations.lightning.JobStrategy(gradwire.connect()))

Lightning's own `ddp_comm_hook` is registered on GPUs alone.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from ..ddp import HookState, Options
from ..worker.script.job import Job
from ..worker.script.terms import ScriptError, Steps
from .hooks import read, registered, write
from .jobs import ONCE, JobLoader, attach, follow, single


class _OfDevice(TypedDict, total=False):
    accelerator: Accelerator | None
    checkpoint_io: CheckpointIO | None
    precision_plugin: Precision | None


class _OfDDP(Options, _OfDevice, total=False):
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    process_group_backend: str | None
    timeout: timedelta | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]
    # These go to DistributedDataParallel.
    broadcast_buffers: bool
    bucket_cap_mb: int
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool


class DDPStrategy(LightningDDPStrategy):
    """Lightning's DDPStrategy whose gradients travel compressed. Each rank's residuals are saved beside the
    checkpoint, in `CHECKPOINT.gradwire-RANK`, and loaded with it.

    Attributes:
        hook_state: state of the hook; None before `fit`.
    """

    def __init__(self, compressor: str = "4bit", **options: Unpack[_OfDDP]) -> None:
        """
        Args:
            compressor: `name[:key=value,...]`, as for `gradwire.ddp.state`.
            options: `rule`, `seed`, `samples` and the like of `gradwire.ddp.state`; all others are those of
                Lightning's strategy.
        """
        own = Options.__optional_keys__ - {"optimizer", "process_group"}
        given: dict[str, Any] = {**options}
        self._own: Any = {name: given.pop(name) for name in own & given.keys()}
        super().__init__(**given)
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


def _unsuited(trainer: Any) -> dict[str, str]:
    """Return the settings of a trainer that a job cannot have, with the reason and the way that works."""
    found: dict[str, str] = {}
    connector = trainer._accelerator_connector
    devices, nodes = len(connector._parallel_devices), connector._num_nodes_flag
    if devices > 1 or nodes > 1:
        found[f"devices={devices}, num_nodes={nodes}"] = (
            "a job's worker uses one device; set both to 1, and start a worker for each"
        )
    if trainer.max_epochs == -1 and trainer.max_steps == -1:
        found["max_epochs=-1 without max_steps"] = "a job has a number of epochs; set max_epochs or max_steps"
    if trainer.reload_dataloaders_every_n_epochs:
        found["reload_dataloaders_every_n_epochs"] = "a job has one data set; leave it out"
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        found["gradient_clip_algorithm='value'"] = "a job clips by the norm; choose 'norm'"
    if connector._layer_sync is not None:
        found["sync_batchnorm"] = "each worker normalizes by its own batch; leave it out"
    if any(each.frequency != 1 for each in trainer.strategy.lr_scheduler_configs):
        found["frequency of a scheduler"] = (
            "a worker that joins late could not count its steps; use 1, and a LambdaLR of step // frequency"
        )
    for each in trainer.callbacks:
        if isinstance(each, StochasticWeightAveraging):
            found["StochasticWeightAveraging"] = (
                "it replaces the scheduler that the job follows; use Lightning's WeightAveraging callback"
            )
        if isinstance(each, (LearningRateFinder, BatchSizeFinder)):
            found[type(each).__name__] = "it trains, and goes back; run it in a trainer without JobStrategy"
    return found


class JobStrategy(SingleDeviceStrategy):
    """Lightning in a process that is a worker of a job.

    The job divides the data set of the training loader; its rank 0 writes checkpoints and logs. The job gets
    the numbers that a validation logs.
    """

    def __init__(
        self, job: Job, *, steps: Steps = "server", device: Any = "cpu", **options: Unpack[_OfDevice]
    ) -> None:
        """
        Args:
            job: job of this process, from `gradwire.connect`.
            steps: as for `Job.attach`.
            device: device of the model, such as "cuda:0".
            options: those of Lightning's SingleDeviceStrategy.
        """
        super().__init__(device=device, **options)
        self._job = job
        self._steps: Steps = steps
        self._loader: JobLoader | None = None
        any_function: Any = rank_zero_only
        self.global_rank = any_function.rank = job.rank

    @property
    def is_global_zero(self) -> bool:
        """True at the job's rank 0."""
        return self.global_rank == 0

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizers and schedulers as Lightning does, and attach them to the job.

        Raises:
            ScriptError: there are several optimizers, precision is "16-mixed", a scheduler follows a metric,
                the trainer has a setting or callback that a job cannot have, or fits twice; and as
                `Job.attach`.
            ModelError: as `Job.attach`.
        """
        super().setup_optimizers(trainer)
        if self._loader is not None:
            raise ScriptError(f"JobStrategy: {ONCE}")
        if unsuited := _unsuited(trainer):
            raise ScriptError("JobStrategy: " + "; ".join(f"{name}: {why}" for name, why in unsuited.items()))
        optimizer, clips = attach(
            self._job,
            self.lightning_module,  # type: ignore[arg-type]
            single(self.optimizers),
            clip_norm=trainer.gradient_clip_val or 0.0,
            scaler=getattr(self.precision_plugin, "scaler", None),
            steps=self._steps,
        )
        self.optimizers = [optimizer]
        if clips:
            trainer.gradient_clip_val = None
        for each in self.lr_scheduler_configs:
            follow(self._job, each.scheduler, each.interval)

    def process_dataloader(self, dataloader: object) -> object:
        """Replace the training loader by the job's batches.

        Raises:
            ScriptError: there are several training loaders; and as `JobLoader`.
        """
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        if not trainer.training:
            return dataloader
        if self._loader is not None:
            raise ScriptError(
                "JobStrategy: several training loaders: a job divides one data set; join them in a "
                "torch.utils.data.StackDataset or ConcatDataset"
            )
        epochs = trainer.max_epochs if (trainer.max_epochs or 0) > 0 else None
        self._loader = JobLoader(
            self._job,
            dataloader,
            epochs=epochs,
            accumulate=trainer.accumulate_grad_batches,
            max_steps=trainer.max_steps,
            over=lambda: setattr(trainer, "should_stop", True),
        )
        return self._loader.batches

    def on_train_start(self) -> None:
        """Check that training begins at its start.

        Raises:
            ScriptError: Lightning continues from a checkpoint.
        """
        if self.lightning_module.trainer.global_step:  # type: ignore[union-attr]
            raise ScriptError(
                "JobStrategy: fit(ckpt_path=...) would repeat what the job has trained; start gc-server with "
                "--state, whose job continues by itself"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step as its forward pass, after which gradients may leave."""
        module: Any = self.lightning_module
        with self.precision_plugin.train_step_context():
            found = self._forward_redirection(module, module, "training_step", *args, **kwargs)
        loss: Any = found["loss"] if isinstance(found, dict) else found
        if isinstance(loss, torch.Tensor):
            self._job.log(loss=loss)
        return found

    def on_validation_start(self) -> None:
        """Take the job's buffers, where its epoch has ended."""
        if self._loader is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:  # type: ignore[union-attr]
            self._loader.end_epoch()

    def on_validation_end(self) -> None:
        """Report the validation's numbers."""
        if self._loader is not None:
            self._loader.evaluated(self.lightning_module.trainer.callback_metrics)  # type: ignore[union-attr]

    def on_train_end(self) -> None:
        """Leave the job."""
        if self._loader is not None:
            self._loader.finish()
