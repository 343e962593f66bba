"""Readers of CIFAR-10, CIFAR-100 and MNIST in the files that their authors publish.

- CIFAR-10: data_batch_1.bin to data_batch_5.bin and test_batch.bin, with records of a label (1 byte) and
  pixels (3072 bytes).
- CIFAR-100: train.bin and test.bin, with records of a coarse label, a fine label (1 byte each) and pixels.
- MNIST: train-images-idx3-ubyte, train-labels-idx1-ubyte and the same with t10k. The format is IDX: a
  big-endian magic number and the sizes, then one byte for each value.

Pixels are red, green and blue planes of 32 x 32, row by row (CIFAR), or one plane of 28 x 28 (MNIST). A file
may be compressed with gzip under its name with `.gz`. CIFAR's archive is read without being unpacked. The
pickled version of CIFAR is refused, because unpickling runs code of the file.

Sources: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009); Y. LeCun et al.,
"Gradient-Based Learning Applied to Document Recognition" (1998).
"""

from __future__ import annotations

import gzip
import lzma
import struct
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire import TaskError

Bytes = npt.NDArray[np.uint8]

_DAMAGED = (OSError, EOFError, KeyError, zlib.error, lzma.LZMAError, tarfile.TarError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Images with their classes.

    Attributes:
        pixels: uint8, shape (images, channels, side, side).
        labels: int64, shape (images,), from 0.
    """

    pixels: Bytes
    labels: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """A published data set, and how its files are read.

    Attributes:
        name: as the task is called.
        channels, side, classes: of the images.
        train, validation: names of the files with the images that train and that validate.
        label_bytes: bytes in front of each image, the last of which is the label; 0 for IDX files.
        download: clause of messages about missing files: file names, MD5 sums and their page.
    """

    name: str
    channels: int
    side: int
    classes: int
    train: Sequence[str]
    validation: Sequence[str]
    label_bytes: int
    download: str

    @property
    def pixels(self) -> int:
        """Bytes of an image without its label."""
        return self.channels * self.side * self.side


CIFAR10 = ImageSet(
    name="cifar10",
    channels=3,
    side=32,
    classes=10,
    train=[f"data_batch_{number}.bin" for number in range(1, 6)],
    validation=["test_batch.bin"],
    label_bytes=1,
    download="cifar-10-binary.tar.gz (MD5 c32a1d4ab5d03f1284b67883e8d87530) from "
    "https://www.cs.toronto.edu/~kriz/cifar.html",
)
CIFAR100 = ImageSet(
    name="cifar100",
    channels=3,
    side=32,
    classes=100,
    train=["train.bin"],
    validation=["test.bin"],
    label_bytes=2,
    download="cifar-100-binary.tar.gz (MD5 03b5dce01913d631647c71ecec9e9cb8) from "
    "https://www.cs.toronto.edu/~kriz/cifar.html",
)
MNIST = ImageSet(
    name="mnist",
    channels=1,
    side=28,
    classes=10,
    train=["train-images-idx3-ubyte", "train-labels-idx1-ubyte"],
    validation=["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"],
    label_bytes=0,
    download="train-images-idx3-ubyte.gz (MD5 f68b3c2dcbeaaa9fbdd348bbdeb94873), "
    "train-labels-idx1-ubyte.gz (d53e105ee54ea40749a09fcbcd1e9432), t10k-images-idx3-ubyte.gz "
    "(9fb629c4189551a2d022fa330f9573f3) and t10k-labels-idx1-ubyte.gz (ec29112dd5afa0611ce80d1b7f02629c) "
    "from http://yann.lecun.com/exdb/mnist/ or a mirror",
)


class DataFileError(TaskError):
    """A data file that is damaged, truncated or of another format. The message names the file, the offset and
    the expected content."""


def read_images(of: ImageSet, data: Path) -> tuple[Images, Images]:
    """Read the images that train and those that validate.

    Args:
        of: the data set.
        data: folder with the files, or with CIFAR's folder of them; or CIFAR's archive.

    Raises:
        DataFileError: a file is missing, damaged, truncated or of another format.
    """
    return _read(of, data, of.train), _read(of, data, of.validation)


def _read(of: ImageSet, data: Path, names: Sequence[str]) -> Images:
    files = [_bytes(of, data, name) for name in names]
    if of.label_bytes:
        parsed = [_records(of, name, content) for name, content in files]
        pixels = np.concatenate([each.pixels for each in parsed])
        labels = np.concatenate([each.labels for each in parsed])
    else:
        (image_file, images), (label_file, classes) = files
        pixels = _idx(image_file, images, (None, of.side, of.side))[:, None]
        labels = _idx(label_file, classes, (len(pixels),)).astype(np.int64)
        _check_labels(label_file, labels, of.classes, 8, 1)
    return Images(pixels=pixels, labels=labels)


def _records(of: ImageSet, name: str, content: Bytes) -> Images:
    """Parse a file of CIFAR's binary version."""
    record = of.label_bytes + of.pixels
    if not len(content) or len(content) % record:
        whole = len(content) // record
        raise DataFileError(
            f"{name}: at byte {whole * record}: expected records of {record} bytes, "
            f"got {len(content) - whole * record} bytes after {whole} records"
        )
    rows = content.reshape(-1, record)
    labels = rows[:, of.label_bytes - 1].astype(np.int64)
    _check_labels(name, labels, of.classes, of.label_bytes - 1, record)
    return Images(pixels=rows[:, of.label_bytes :].reshape(-1, of.channels, of.side, of.side), labels=labels)


def _check_labels(name: str, labels: npt.NDArray[np.int64], classes: int, first: int, apart: int) -> None:
    """Raise DataFileError for a label out of range.

    Args:
        first: offset of the first label in bytes.
        apart: bytes from one label to the next.
    """
    wrong = np.flatnonzero(labels >= classes)
    if len(wrong):
        offset = first + int(wrong[0]) * apart
        raise DataFileError(
            f"{name}: at byte {offset}: expected a label from 0 to {classes - 1}, got {labels[wrong[0]]}"
        )


def _idx(name: str, content: Bytes, shape: tuple[int | None, ...]) -> Bytes:
    """Parse an IDX file of bytes. shape: the sizes that it must have, None for any."""
    magic = 0x800 + len(shape)
    head = 4 + 4 * len(shape)
    found = struct.unpack(f">{1 + len(shape)}I", content[:head].tobytes()) if len(content) >= head else ()
    for number, (got, expected) in enumerate(zip(found, (magic, *shape), strict=False)):
        if expected is not None and got != expected:
            what = "the magic number" if not number else "the size"
            raise DataFileError(f"{name}: at byte {4 * number}: expected {what} {expected}, got {got}")
    size = head + (int(np.prod(found[1:], dtype=object)) if found else 0)
    if not found or len(content) != size or not found[1]:
        raise DataFileError(
            f"{name}: at byte {min(len(content), size)}: expected the end of {size} bytes and at least one "
            f"value, got {len(content)} bytes"
        )
    return content[head:].reshape(found[1:])


def _bytes(of: ImageSet, data: Path, name: str) -> tuple[str, Bytes]:
    """Find and read a file. Returns the name that messages give it, and its bytes."""
    if data.is_file():
        return f"{data}: {name}", _from_archive(of, data, name)
    for path in (data / name, data / f"{name}.gz", *data.glob(f"*/{name}"), *data.glob(f"*/{name}.gz")):
        if path.is_file():
            return str(path), _from_file(path)
    archives = [*data.glob("*binary.tar.gz")] if of.label_bytes else []
    if archives:
        return f"{archives[0]}: {name}", _from_archive(of, archives[0], name)
    pickled = name.removesuffix(".bin")
    if any(data.glob(f"**/{pickled}")):
        raise DataFileError(
            f"{data}: has the pickled version of {of.name}, which is not read because unpickling runs code "
            f"of the file; download {of.download}"
        )
    raise DataFileError(
        f"{data}: expected the file {name}; download {of.download}, put it into this folder, and start again"
    )


def _from_file(path: Path) -> Bytes:
    """Read a file, decompressed if its name ends in .gz."""
    found = bytearray()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while chunk := file.read(1 << 20):
                found += chunk
    except _DAMAGED as error:
        raise DataFileError(f"{path}: at byte {len(found)} of the content: cannot be read: {error}") from None
    return np.frombuffer(bytes(found), np.uint8)


def _from_archive(of: ImageSet, path: Path, name: str) -> Bytes:
    """Read a member of a tar archive, which may lie in a folder in there."""
    try:
        _check_sums(path, path.stat().st_mtime_ns)
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name.rpartition("/")[2] == name else None
                if file is not None:
                    content = file.read()
                    if len(content) != member.size:
                        raise DataFileError(
                            f"{path}: {name}: at byte {len(content)}: expected {member.size} bytes"
                        )
                    return np.frombuffer(content, np.uint8)
    except tarfile.ReadError as error:
        reason = "" if "\n" in str(error) or "successfully" in str(error) else f": {error}"
        raise DataFileError(
            f"{path}: at {name}: expected a folder, or a whole tar archive{reason}; download {of.download}"
        ) from None
    except _DAMAGED as error:
        raise DataFileError(f"{path}: at {name}: cannot be read: {error}; download {of.download}") from None
    raise DataFileError(f"{path}: expected the file {name} in the archive; download {of.download}")


@cache
def _check_sums(path: Path, modified_ns: int) -> None:
    """Read an archive to its end, where a compressed one has its checksum, so that no damage goes unseen.

    Args:
        path: the archive.
        modified_ns: time of its last change, so that a changed file is checked again.
    """
    with tarfile.open(path) as archive:
        file: Any = archive.fileobj  # decompressed
        while file.read(1 << 20):
            pass


def synthetic(of: ImageSet, count: int, seed: int) -> list[tuple[str, bytes]]:
    """Make files of one half of a data set, of images that a network can learn to tell apart.

    Each class is a smooth pattern of its own, and each image is its pattern, shifted and noisy.

    Args:
        of: the data set whose format the files have.
        count: number of images.
        seed: of classes, shifts and noise; patterns depend on the data set alone.

    Returns:
        Names, those of `of.train`, and contents, in the format of the real files. Images are divided evenly
        among the files.
    """
    patterns = np.random.default_rng(0).normal(size=(of.classes, of.channels, 4, 4))
    patterns = patterns.repeat(of.side // 4, axis=2).repeat(of.side // 4, axis=3)
    draw = np.random.default_rng([1, seed])
    labels = draw.permutation(np.arange(count) % of.classes).astype(np.uint8)
    shifts = draw.integers(-2, 3, size=(count, 2))
    noise = draw.normal(scale=0.7, size=(count, of.channels, of.side, of.side))
    shifted = np.stack([np.roll(patterns[c], s, (1, 2)) for c, s in zip(labels, shifts, strict=True)])
    pixels = np.clip(128 + 48 * (shifted + noise), 0, 255).astype(np.uint8)
    if not of.label_bytes:
        head = struct.pack(">4I", 0x803, count, of.side, of.side), struct.pack(">2I", 0x801, count)
        return [(of.train[0], head[0] + pixels.tobytes()), (of.train[1], head[1] + labels.tobytes())]
    coarse = [labels // 5] if of.label_bytes == 2 else []
    rows = np.column_stack([*coarse, labels, pixels.reshape(count, -1)])
    return [
        (name, part.tobytes())
        for name, part in zip(of.train, np.array_split(rows, len(of.train)), strict=True)
    ]


def read_synthetic(of: ImageSet, count: int, seed: int) -> Images:
    """Return the images of `synthetic`, parsed from its files."""
    files = [(name, np.frombuffer(content, np.uint8)) for name, content in synthetic(of, count, seed)]
    if of.label_bytes:
        parsed = [_records(of, name, content) for name, content in files if len(content)]
        return Images(
            pixels=np.concatenate([each.pixels for each in parsed]),
            labels=np.concatenate([each.labels for each in parsed]),
        )
    pixels = _idx(*files[0], (None, of.side, of.side))[:, None]
    return Images(pixels=pixels, labels=_idx(*files[1], (len(pixels),)).astype(np.int64))
