"""The hyperspectral task: scenes in their file formats, the areas that judge a detector, the autoencoder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import io

from gradwire import TaskError
from gradwire import load_task as load
from gradwire_papers.hyperspectral import AdversarialAutoencoder, detection, energy_minimized
from gradwire_papers.image_files import DataFileError
from gradwire_papers.scenes import read_scene, synthetic_scene

MATLAB: Any = io

ROWS, COLUMNS, BANDS = 3, 4, 5
CUBE = np.arange(ROWS * COLUMNS * BANDS, dtype=np.float32).reshape(ROWS, COLUMNS, BANDS)
MAP = np.zeros((ROWS, COLUMNS), np.uint8)
MAP[1, 2] = 7


def envi(folder: Path, name: str, values: np.ndarray, interleave: str) -> Path:
    """Write an ENVI file byte for byte: a text header, and the values in the order that it names."""
    cube = values if values.ndim == 3 else values[:, :, None]
    order = {"bsq": (2, 0, 1), "bil": (0, 2, 1), "bip": (0, 1, 2)}[interleave]
    code = {"float32": 4, "uint8": 1}[str(values.dtype)]
    (folder / f"{name}.img").write_bytes(np.ascontiguousarray(cube.transpose(order)).tobytes())
    header = folder / f"{name}.hdr"
    header.write_text(
        f"ENVI\nsamples = {cube.shape[1]}\nlines = {cube.shape[0]}\nbands = {cube.shape[2]}\n"
        f"header offset = 0\n"
        f"file type = ENVI Standard\ndata type = {code}\ninterleave = {interleave}\nbyte order = 0\n"
    )
    return header


@pytest.mark.parametrize("interleave", ["bsq", "bil", "bip"])
def test_envi_files_are_read_byte_for_byte(tmp_path: Path, interleave: str) -> None:
    spectra, targets = read_scene(
        envi(tmp_path, "scene", CUBE, interleave), envi(tmp_path, "map", MAP, interleave)
    )
    assert np.array_equal(spectra, CUBE.reshape(-1, BANDS))
    assert np.flatnonzero(targets).tolist() == [1 * COLUMNS + 2]


@pytest.mark.parametrize("apart", [False, True])
def test_matlab_files_are_read(tmp_path: Path, apart: bool) -> None:
    if apart:
        MATLAB.savemat(tmp_path / "scene.mat", {"data": CUBE})
        MATLAB.savemat(tmp_path / "map.mat", {"gt": MAP})
    else:
        MATLAB.savemat(tmp_path / "scene.mat", {"data": CUBE, "map": MAP})
    spectra, targets = read_scene(tmp_path / "scene.mat", tmp_path / "map.mat" if apart else None)
    assert np.array_equal(spectra, CUBE.reshape(-1, BANDS))
    assert np.flatnonzero(targets).tolist() == [6]


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    scene, marks = envi(tmp_path, "scene", CUBE, "bip"), envi(tmp_path, "map", MAP, "bip")

    def refused(words: str, data: Path = scene, targets: Path | None = marks) -> None:
        with pytest.raises(DataFileError, match=words):
            read_scene(data, targets)

    refused("nothing.hdr: expected an ENVI header", tmp_path / "nothing.hdr")
    other = envi(tmp_path, "other", MAP[:2], "bip")
    refused(r"other.hdr: expected a map of 3 x 4 pixels, got \(2, 4\)", targets=other)
    refused("scene.hdr: expected a map with one band, got 5", targets=scene)
    refused("expected targets and background, got 0 targets", targets=envi(tmp_path, "no", MAP * 0, "bip"))
    wrong = CUBE.copy()
    wrong[0, 1, 0] = np.nan
    refused("at pixel 1: expected finite values", envi(tmp_path, "nan", wrong, "bip"))
    (tmp_path / "scene.img").write_bytes(CUBE.tobytes()[:-4])
    refused("scene.img: at byte 236: expected 240 bytes")
    header = scene.read_text()
    (tmp_path / "scene.img").write_bytes(CUBE.tobytes())
    for old, new, words in (
        ("interleave = bip", "interleave = xyz", "expected interleave bsq, bil or bip"),
        ("interleave = bip", "interleave = bip\nfile compression = 1", "and no compression"),
        ("lines = 3", "lines = -3", "expected an image"),
        ("header offset = 0", "header offset = -4", "expected an image"),
        ("data type = 4", "data type = 6", "at byte 240: expected 480 bytes"),
    ):
        assert old in header
        scene.write_text(header.replace(old, new))
        refused(f"scene.*{words}")
    (tmp_path / "scene.img").write_bytes(CUBE.tobytes() * 2)
    refused("scene.hdr: expected real numbers, got complex64")
    MATLAB.savemat(tmp_path / "complex.mat", {"data": CUBE * 1j, "map": MAP})
    refused("complex.mat: expected real numbers, got complex", tmp_path / "complex.mat", None)
    scene.write_text("ENVI\nsamples = 4\n")
    refused("scene.hdr: expected an ENVI header with its data file")
    (tmp_path / "cut.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(50))
    refused("cut.mat: expected a MATLAB file of version 4 to 7.2", tmp_path / "cut.mat", None)
    MATLAB.savemat(tmp_path / "two.mat", {"a": CUBE, "b": CUBE, "map": MAP})
    refused("expected one array of 3 dimensions, got 2: a, b", tmp_path / "two.mat", None)


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spectral.io", None)
    with pytest.raises(TaskError, match=r"needs spectral.io.*'./papers\[hyperspectral\]'"):
        read_scene(envi(tmp_path, "scene", CUBE, "bip"), None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "expected data=PATH"),
        (":synthetic=10", "100 to 10000000, got 10"),
        (":synthetic=200,code=0", "code"),
    ],
)
def test_options_that_make_no_task_are_refused(options: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        load(f"hyperspectral{options}")


def test_the_areas_are_those_of_the_curves() -> None:
    draw = np.random.default_rng(0)
    scores, targets = draw.integers(0, 8, 300) / 7, draw.random(300) < 0.2
    scores[targets] = np.minimum(1, scores[targets] + 1 / 7)
    thresholds = np.array([np.inf, *np.unique(scores)[::-1]])
    detected = np.array([(scores[targets] >= each).mean() for each in thresholds])
    alarms = np.array([(scores[~targets] >= each).mean() for each in thresholds])
    found = detection(scores, targets)
    assert found["auc"] == pytest.approx(np.trapezoid(detected, alarms))
    steps = np.linspace(0, 1, 70_001)
    area = np.mean([(scores[~targets] >= each).mean() for each in steps[::70]])
    assert found["false_alarm"] == pytest.approx(area, abs=2e-3)
    assert detection(np.ones(4), np.array([True, False, False, True])) == {"auc": 0.5, "false_alarm": 0.0}


def test_energy_is_minimal_under_the_constraint() -> None:
    spectra, targets = synthetic_scene(2000, bands=16)
    target = spectra[targets].mean(axis=0)
    likeness = energy_minimized(spectra, target)
    assert energy_minimized(spectra, target)[targets].mean() > likeness[~targets].mean() + 0.3
    (one,) = energy_minimized(np.vstack([spectra, target]), target)[-1:]
    assert one == pytest.approx(1.0)


def test_the_discriminators_gradient_is_reversed_for_the_encoder() -> None:
    """A step of the discriminator alone lowers the adversarial loss; one of the encoder raises it."""
    torch.manual_seed(0)
    model = AdversarialAutoencoder(6, 32, 2).double()
    for parameter in model.decoder.parameters():
        parameter.data.zero_()  # so the reconstruction's gradient does not reach the encoder
    spectra = torch.randn(64, 6, dtype=torch.float64)

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        found: torch.Tensor = model(spectra)
        return found

    before = loss()
    before.backward()
    for network, sign in ((model.discriminator, -1), (model.encoder, 1)):
        with torch.no_grad():
            for parameter in network.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=10)
            assert sign * (loss() - before) > 0
            for parameter in network.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=10)


def test_targets_are_found_once_it_is_trained() -> None:
    task = load("hyperspectral:synthetic=1000,hidden=64,code=3")
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with torch.no_grad():
        untrained = task.evaluate(model)["auc"]
    for _ in range(40):
        for start in range(0, task.train_samples, 100):
            optimizer.zero_grad()
            task.loss(model, task.batch(np.arange(start, min(start + 100, task.train_samples)))).backward()
            optimizer.step()
    with torch.no_grad():
        trained = task.evaluate(model)["auc"]
    assert trained > 0.95
    assert trained > untrained
