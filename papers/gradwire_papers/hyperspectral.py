"""Hyperspectral target detection with an adversarial autoencoder (AAE), the first task of the thesis.

The AAE learns to reconstruct background spectra, while a discriminator compares its codes with samples of a
normal distribution. So it reconstructs background well and targets badly: a pixel's score is its
reconstruction error. Background pixels are those that least resemble the known target spectrum: constrained
energy minimization (CEM) with the mean spectrum of the marked targets ranks the pixels, and the upper tenth
does not train. Validation reports

    auc           area under (false alarm rate, detection rate), the thesis's AUC(F0, F1)
    false_alarm   area under (threshold, false alarm rate) for scores from 0 to 1: its FPR, (2-12)

Sources: Makhzani et al., "Adversarial Autoencoders" (2015); the thesis, sections 2.4, 2.5 and 3.3. Encoder,
decoder and discriminator have two hidden layers of 1000 units there, and Adam's rate is 1e-4. CEM: Farrand
and Harsanyi (1997).

Deviations: one backward pass trains all three networks, because the discriminator's gradient is reversed on
its way to the encoder (Ganin and Lempitsky, 2015) where the paper alternates. The thesis does not say how
background is chosen and how a pixel is scored. Erratum of (2-11): the false alarm rate is
FP / (TN + FP), not TP / (TN + FP). Erratum of the text on (2-12): the area that is better if smaller is
AUC(F1, tau), under (threshold, false alarm rate), not AUC(F1, F0).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire import Task, TaskSpecError

from .scenes import read_scene, synthetic_scene

BACKGROUND = 0.9  # share of the pixels that train
ADVERSARIAL = 0.01  # weight of the adversarial loss beside the mean squared error of standardized spectra
EVALUATED_AT_ONCE = 4096  # pixels


def hyperspectral(
    data: Path | None = None,
    targets: Path | None = None,
    synthetic: int = 0,
    hidden: int = 1000,
    code: int = 8,
) -> Task:
    """Make the task. Nine tenths of the pixels train, without labels, and every pixel validates.

    Args:
        data: ENVI header or MATLAB file of the scene.
        targets: ENVI header or MATLAB file of the map of targets, unless `data` is a MATLAB file with both.
        synthetic: number of pixels of a made scene in place of `data`; 0 for none.
        hidden: units of each hidden layer.
        code: elements of a code.

    Raises:
        TaskSpecError: options that do not go together.
        DataFileError: the files cannot be used.
        TaskError: a library that reads them is not installed.
    """
    if (data is None) == (synthetic == 0) or (targets is not None and data is None):
        raise TaskSpecError(
            "task 'hyperspectral': expected data=PATH (an ENVI header or a MATLAB file, such as "
            "AeroRIT's) with targets=PATH, or synthetic=PIXELS for a made scene"
        )
    for option, value, least, most in (
        ("synthetic", synthetic, 100 if data is None else 0, 10_000_000),
        ("hidden", hidden, 1, 100_000),
        ("code", code, 1, 10_000),
    ):
        if not least <= value <= most:
            raise TaskSpecError(
                f"task 'hyperspectral': option {option}: expected {least} to {most}, got {value}"
            )
    found, mask = read_scene(data, targets) if data is not None else synthetic_scene(synthetic)
    spectra = torch.from_numpy(found)
    spectra = (spectra - spectra.mean(dim=0)) / spectra.std(dim=0).clamp_min(1e-6)
    likeness = torch.from_numpy(energy_minimized(found, found[mask].mean(axis=0)))
    background = spectra[likeness.argsort(stable=True)[: int(BACKGROUND * len(spectra))]]

    def batch(indices: npt.NDArray[np.int64]) -> Tensor:
        return background[torch.as_tensor(indices)]

    def loss(network: nn.Module, samples: Any) -> Tensor:
        total: Tensor = network(samples)
        return total

    def evaluate(network: nn.Module) -> Mapping[str, float]:
        assert isinstance(network, AdversarialAutoencoder)
        device = next(network.parameters()).device
        starts = range(0, len(spectra), EVALUATED_AT_ONCE)
        parts = [spectra[start : start + EVALUATED_AT_ONCE].to(device) for start in starts]
        errors = torch.cat([network.errors(part).cpu() for part in parts])
        return {"loss": float(errors.mean()), **detection(errors.double().numpy(), mask)}

    return Task(
        name="hyperspectral target detection",
        train_samples=len(background),
        model=lambda: AdversarialAutoencoder(spectra.shape[1], hidden, code),
        batch=batch,
        loss=loss,
        evaluate=evaluate,
    )


def energy_minimized(
    spectra: npt.NDArray[np.float32], target: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Return how much each pixel resembles a target, by constrained energy minimization: about 1 for the
    target, 0 for background.

    Args:
        spectra: float32, shape (pixels, bands).
        target: float32, shape (bands,).

    Returns:
        d' R⁻¹ x / (d' R⁻¹ d) for target d, pixel x and R, the mean of x x': shape (pixels,).
    """
    wide = spectra.astype(np.float64)
    correlation = wide.T @ wide / len(wide)
    correlation += 1e-6 * np.trace(correlation) / len(correlation) * np.eye(len(correlation))
    solve: Any = np.linalg.solve
    weights: npt.NDArray[np.float64] = solve(correlation, target.astype(np.float64))
    likeness: npt.NDArray[np.float64] = wide @ weights / (target @ weights)
    return likeness


def detection(scores: npt.NDArray[np.float64], targets: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Return the two areas by which a detector is judged.

    Args:
        scores: larger for a target, shape (pixels,).
        targets: bool, shape (pixels,).

    Returns:
        `auc`: probability that a target scores higher than background, ties counted half. `false_alarm`: area
        under the false alarm rate over thresholds from 0 to 1. That is the mean score of background, once
        scores are scaled to 0 … 1.
    """
    order = np.sort(scores[~targets])
    below = np.searchsorted(order, scores[targets], "left")
    up_to = np.searchsorted(order, scores[targets], "right")
    span = float(np.ptp(scores)) or 1.0
    return {
        "auc": float((below + up_to).mean() / (2 * len(order))),
        "false_alarm": float(((scores[~targets] - scores.min()) / span).mean()),
    }


class _Reversed(torch.autograd.Function):
    """The identity, whose gradient changes its sign."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor) -> Tensor:
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, *passed: Tensor) -> Tensor:
        return -passed[0]


class AdversarialAutoencoder(nn.Module):
    """Encoder, decoder and discriminator. Called with spectra, shape (pixels, bands), it returns the loss."""

    def __init__(self, bands: int, hidden: int, code: int) -> None:
        super().__init__()
        self.code = code
        self.encoder = _layers(bands, hidden, code)
        self.decoder = _layers(code, hidden, bands)
        self.discriminator = _layers(code, hidden, 1)

    def forward(self, spectra: Tensor) -> Tensor:
        """Return reconstruction error plus adversarial loss, a scalar."""
        codes = self.encoder(spectra)
        prior = torch.randn(len(spectra), self.code).to(spectra.device)
        reverse: Any = _Reversed
        judged = self.discriminator(torch.cat([reverse.apply(codes), prior])).squeeze(1)
        real = torch.cat([torch.zeros(len(codes)), torch.ones(len(prior))]).to(spectra.device)
        adversarial = functional.binary_cross_entropy_with_logits(judged, real)
        return functional.mse_loss(self.decoder(codes), spectra) + ADVERSARIAL * adversarial

    def errors(self, spectra: Tensor) -> Tensor:
        """Return the mean squared error of each pixel's reconstruction, shape (pixels,)."""
        rebuilt: Tensor = self.decoder(self.encoder(spectra))
        return (rebuilt - spectra).square().mean(dim=1)


def _layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU()),
        *(nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, outputs),
    )
