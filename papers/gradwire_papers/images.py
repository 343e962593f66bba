"""Image classification: CIFAR-10, CIFAR-100 and MNIST from their published files.

    gc-run --task cifar10:data=/data/cifar-10-binary.tar.gz,model=resnet56
    gc-run --task mnist:synthetic=2000,model=cnn        # made images in the same format, to try things out

Training images are augmented as in He et al. (2016), section 4.2: four zero pixels at each side, a random
crop, and for CIFAR a random reflection. The random numbers follow from the job's seed and the assignment, as
those of dropout do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire import Task, TaskSpecError, parse_split

from .image_files import CIFAR10, CIFAR100, MNIST, Images, ImageSet, read_images, read_synthetic
from .networks import NETWORKS

PADDING = 4  # pixels
EVALUATED_AT_ONCE = 500  # images, so that activations take little memory
MAX_SYNTHETIC = 1_000_000
# Mean and standard deviation of each channel over the training images, of values from 0 to 1.
SCALES = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "mnist": ((0.1307,), (0.3081,)),
}

Model = Literal["resnet20", "resnet56", "resnet110", "resnet50", "vgg16", "vgg19", "inception"]


def cifar10(
    data: Path | None = None,
    model: Model = "resnet20",
    augment: bool = True,
    split: str = "",
    synthetic: int = 0,
) -> Task:
    """Make the task CIFAR-10: 50,000 training images of 32 x 32 in 10 classes, 10,000 for validation.

    Args:
        data: the archive of the binary version, or a folder with its files.
        model: the network.
        augment: whether training images are cropped and reflected at random.
        split: how samples are divided among workers; see `splits.parse_split`.
        synthetic: number of made training images in place of `data`; 0 for none.

    Raises:
        TaskSpecError: options that do not go together, or neither `data` nor `synthetic`.
        DataFileError: the files cannot be used.
    """
    return _task(CIFAR10, data, model, augment, split, synthetic)


def cifar100(
    data: Path | None = None,
    model: Model = "resnet20",
    augment: bool = True,
    split: str = "",
    synthetic: int = 0,
) -> Task:
    """Make the task CIFAR-100: like `cifar10`, with 100 classes."""
    return _task(CIFAR100, data, model, augment, split, synthetic)


def mnist(
    data: Path | None = None,
    model: Literal["mlp", "cnn", Model] = "mlp",
    augment: bool = False,
    split: str = "",
    synthetic: int = 0,
) -> Task:
    """Make the task MNIST: 60,000 training images of 28 x 28 in 10 classes, 10,000 for validation.

    `data` is a folder with the four IDX files. There are two more models: `mlp` (784-256-128-10 with ReLU)
    and `cnn` (two convolutions, two linear layers). The other arguments and errors are those of `cifar10`.
    """
    return _task(MNIST, data, model, augment, split, synthetic)


def _task(of: ImageSet, data: Path | None, model: str, augment: bool, split: str, synthetic: int) -> Task:
    if (data is None) == (synthetic == 0):
        problem = "data and synthetic: expected one of them"
        if data is None:
            problem = (
                f"expected data=PATH; download {of.download}, and name the file or its folder. "
                "Or train on made images: synthetic=2000"
            )
        raise TaskSpecError(f"task {of.name!r}: {problem}")
    if not 0 <= synthetic <= MAX_SYNTHETIC or 0 < synthetic < of.classes:
        raise TaskSpecError(
            f"task {of.name!r}: option synthetic: expected {of.classes} to {MAX_SYNTHETIC}, got {synthetic}"
        )
    if data is not None:
        train, validation = read_images(of, data)
    else:
        train = read_synthetic(of, synthetic, seed=0)
        validation = read_synthetic(of, max(of.classes, synthetic // 5), seed=1)
    try:
        shares = parse_split(split, train.labels)
    except ValueError as error:
        raise TaskSpecError(f"task {of.name!r}: option {error}") from None

    means, spreads = (torch.tensor(each).view(1, -1, 1, 1) for each in SCALES[of.name])
    pixels, labels = _tensors(train)

    def scaled(rows: Tensor) -> Tensor:
        return (rows.float() / 255 - means) / spreads

    def batch(indices: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices)
        images = scaled(pixels[rows])
        return (augmented(images, reflect=of.channels == 3) if augment else images), labels[rows]

    def loss(network: nn.Module, samples: Any) -> Tensor:
        images, classes = samples
        return functional.cross_entropy(network(images), classes)

    return Task(
        name=f"{of.name} ({model})",
        train_samples=len(labels),
        model=_network(of, model),
        batch=batch,
        loss=loss,
        evaluate=_evaluation(*_tensors(validation), scaled),
        split=shares,
    )


def _tensors(images: Images) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(images.pixels.copy()), torch.from_numpy(images.labels)


def augmented(images: Tensor, *, reflect: bool) -> Tensor:
    """Return a random crop of each padded image, reflected for half of them if `reflect` is set.

    Args:
        images: float32, shape (images, channels, side, side).
    """
    count, _, side, _ = images.shape
    padded = functional.pad(images, (PADDING,) * 4)
    rows = torch.randint(2 * PADDING + 1, (count, 1)) + torch.arange(side)
    columns = torch.randint(2 * PADDING + 1, (count, 1)) + torch.arange(side)
    if reflect:
        columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
    which = torch.arange(count)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _evaluation(
    pixels: Tensor, labels: Tensor, scaled: Callable[[Tensor], Tensor]
) -> Callable[[nn.Module], Mapping[str, float]]:
    def evaluate(network: nn.Module) -> Mapping[str, float]:
        device = next(network.parameters()).device
        total, right = 0.0, 0
        for first in range(0, len(labels), EVALUATED_AT_ONCE):
            part = slice(first, first + EVALUATED_AT_ONCE)
            scores: Tensor = network(scaled(pixels[part]).to(device))
            classes = labels[part].to(device)
            total += functional.cross_entropy(scores, classes, reduction="sum").item()
            right += int((scores.argmax(dim=1) == classes).sum().item())
        return {"loss": total / len(labels), "accuracy": right / len(labels)}

    return evaluate


def _network(of: ImageSet, model: str) -> Callable[[], nn.Module]:
    inputs = of.pixels
    if model == "mlp":
        return lambda: nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(inputs, 256), nn.ReLU()),
            *(nn.Linear(256, 128), nn.ReLU()),
            nn.Linear(128, of.classes),
        )
    if model == "cnn":
        side = of.side // 4
        return lambda: nn.Sequential(
            *(nn.Conv2d(of.channels, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * side * side, 64), nn.ReLU()),
            nn.Linear(64, of.classes),
        )
    network = NETWORKS.get(model) or NETWORKS[f"{model}-cifar"]
    return lambda: network.make(of.channels, of.classes)
