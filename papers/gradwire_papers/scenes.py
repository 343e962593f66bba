"""Hyperspectral scenes with a map of their targets: ENVI and MATLAB files, and a made scene by linear mixing.

    ENVI     NAME.hdr beside NAME or NAME.img (dat, raw): the reflectances; the targets in a second ENVI file
    MATLAB   a .mat file with the reflectances (three dimensions) and the targets (two dimensions)

A pixel of the map that is not 0 is a target. AeroRIT (Rangnekar et al., 2020) and Xiongan New Area (Cen et
al., 2020), which the thesis uses, are published in these formats.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire import TaskError

from .image_files import DataFileError

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

ENDMEMBERS = 4  # background materials of a made scene


def read_scene(data: Path, targets: Path | None) -> tuple[Floats, Mask]:
    """Read a scene.

    Args:
        data: ENVI header (.hdr) or MATLAB file (.mat) with the reflectances.
        targets: the same for the map of targets; None if the MATLAB file has both.

    Returns:
        Spectra, float32, shape (pixels, bands), and whether each pixel is a target, bool, shape (pixels,).

    Raises:
        DataFileError: a file is missing, damaged, truncated or of another format.
        TaskError: the library that reads the format is not installed.
    """
    cube = _array(data, 3)
    found = _array(data if targets is None else targets, 2)
    if found.shape != cube.shape[:2]:
        where = targets or data
        raise DataFileError(
            f"{where}: expected a map of {cube.shape[0]} x {cube.shape[1]} pixels, got {found.shape}"
        )
    spectra = cube.reshape(-1, cube.shape[2]).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(spectra).all(axis=1))
    if len(wrong):
        raise DataFileError(f"{data}: at pixel {wrong[0]}: expected finite values")
    mask = found.reshape(-1) != 0
    if mask.all() or not mask.any():
        raise DataFileError(f"{targets or data}: expected targets and background, got {mask.sum()} targets")
    return spectra, mask


def _array(path: Path, dimensions: int) -> npt.NDArray[Any]:
    """Read an array of 2 or 3 dimensions."""
    if not path.is_file():
        raise DataFileError(f"{path}: expected an ENVI header (.hdr) or a MATLAB file (.mat), found no file")
    reader: Callable[[Path, int], npt.NDArray[Any]] = _matlab if path.suffix == ".mat" else _envi
    try:
        return reader(path, dimensions)
    except ModuleNotFoundError as error:
        raise TaskError(
            f"{path}: reading it needs {error.name}, which is not installed; "
            "pip install './papers[hyperspectral]' in a checkout of Gradwire brings it"
        ) from None


def _matlab(path: Path, dimensions: int) -> npt.NDArray[Any]:
    from scipy import io

    library: Any = io
    try:
        contents: list[tuple[str, tuple[int, ...], str]] = library.whosmat(path)
        names = [name for name, shape, _ in contents if len(shape) == dimensions and min(shape) > 1]
        found: dict[str, npt.NDArray[Any]] = library.loadmat(path, variable_names=names)
    except Exception as error:  # the library raises many kinds for a damaged file
        raise DataFileError(f"{path}: expected a MATLAB file of version 4 to 7.2: {error}") from None
    if len(names) != 1:
        raise DataFileError(
            f"{path}: expected one array of {dimensions} dimensions, got {len(names)}: {', '.join(names)}"
        )
    return _real(path, np.asarray(found[names[0]]))


def _real(path: Path, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values if they are real numbers; raise DataFileError otherwise."""
    if values.dtype.kind not in "biuf":
        raise DataFileError(f"{path}: expected real numbers, got {values.dtype}")
    return values


def _envi(path: Path, dimensions: int) -> npt.NDArray[Any]:
    from spectral.io import envi

    library: Any = envi
    try:
        opened = library.open(str(path))
    except Exception as error:  # the library has no common base for a header that it cannot read
        raise DataFileError(
            f"{path}: expected an ENVI header with its data file beside it: {error}"
        ) from None
    header: dict[str, str] = opened.metadata
    sizes: tuple[int, ...] = getattr(opened, "shape", ())
    if len(sizes) != 3 or min(sizes) < 1 or opened.offset < 0:
        raise DataFileError(f"{path}: expected an image, got {sizes} lines, samples and bands")
    interleave, compressed = header.get("interleave", ""), header.get("file compression", "0")
    if interleave.lower() not in ("bsq", "bil", "bip") or compressed != "0":
        raise DataFileError(
            f"{path}: expected interleave bsq, bil or bip, and no compression, got interleave {interleave!r} "
            f"and file compression {compressed!r}"
        )
    rows, columns, bands = sizes
    size: int = opened.offset + rows * columns * bands * opened.sample_size
    got = Path(opened.filename).stat().st_size
    if got < size:
        raise DataFileError(f"{opened.filename}: at byte {got}: expected {size} bytes, as {path} says")
    cube: npt.NDArray[Any] = _real(path, np.asarray(opened.open_memmap(interleave="bip")))
    if dimensions == 3:
        return cube
    if bands != 1:
        raise DataFileError(f"{path}: expected a map with one band, got {bands}")
    return cube[:, :, 0]


def synthetic_scene(pixels: int, bands: int = 64, seed: int = 0) -> tuple[Floats, Mask]:
    """Make a scene by linear mixing.

    Every pixel mixes the smooth spectra of `ENDMEMBERS` materials, with abundances drawn from a Dirichlet
    distribution. In a target, 2 % of the pixels, another material takes 5 to 40 % of the pixel. Noise has
    0.4 % of the power.

    Args:
        pixels: number of pixels.
        bands: number of bands.
        seed: of materials, abundances and noise.

    Returns:
        The same as `read_scene`.
    """
    draw = np.random.default_rng(seed)
    bumps = draw.normal(size=(ENDMEMBERS + 1, bands + 16))
    smooth = np.stack([np.convolve(each, np.hanning(17), "valid") for each in bumps])
    spectra = (smooth - smooth.min(1, keepdims=True)) / np.ptp(smooth, axis=1, keepdims=True)
    targets = np.zeros(pixels, bool)
    targets[draw.permutation(pixels)[: max(1, pixels // 50)]] = True
    abundances = draw.dirichlet(np.ones(ENDMEMBERS), pixels)
    share = np.where(targets, draw.uniform(0.05, 0.4, pixels), 0.0)[:, None]
    mixed: npt.NDArray[np.float64] = (1 - share) * (abundances @ spectra[:-1]) + share * spectra[-1]
    noise: npt.NDArray[np.float64] = draw.normal(
        scale=float(np.sqrt(4e-3 * np.mean(mixed**2))), size=mixed.shape
    )
    scene: Floats = (mixed + noise).astype(np.float32)
    return scene, targets
