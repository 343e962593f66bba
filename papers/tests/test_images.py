"""The image tasks: published formats byte for byte, damaged files, augmentation, networks and splits."""

from __future__ import annotations

import gzip
import io
import re
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire import TaskError, TaskSpecError
from gradwire import load_task as load
from gradwire_papers.image_files import (
    CIFAR10,
    CIFAR100,
    MNIST,
    DataFileError,
    ImageSet,
    read_images,
    synthetic,
)
from gradwire_papers.images import augmented

PER_FILE = 4


def cifar_record(label: int, value: int, coarse: int | None = None) -> bytes:
    """One image of the binary version: its red plane has `value`, green `value + 1`, blue `value + 2`."""
    planes = b"".join(bytes([value + plane]) * 1024 for plane in range(3))
    return bytes([] if coarse is None else [coarse]) + bytes([label]) + planes


def cifar10_files() -> dict[str, bytes]:
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    return {
        name: b"".join(cifar_record((number + row) % 10, 10 * number + row) for row in range(PER_FILE))
        for number, name in enumerate(names)
    }


def mnist_files(side: int = 28) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name, count in (("train", 6), ("t10k", 3)):
        pixels = bytes(number % 251 for number in range(count * side * side))
        files[f"{name}-images-idx3-ubyte"] = struct.pack(">IIII", 2051, count, side, side) + pixels
        files[f"{name}-labels-idx1-ubyte"] = struct.pack(">II", 2049, count) + bytes(range(count))
    return files


def put(folder: Path, files: dict[str, bytes], *, compress: bool = False) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    for name, content in files.items():
        if compress:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            about = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return path


@pytest.mark.parametrize("form", ["folder", "gz", "below", "archive", "archive in folder"])
def test_cifar_10_is_read_byte_for_byte(tmp_path: Path, form: str) -> None:
    files = cifar10_files()
    data = {
        "folder": lambda: put(tmp_path / "a", files),
        "gz": lambda: put(tmp_path / "a", files, compress=True),
        "below": lambda: put(tmp_path / "a" / "cifar-10-batches-bin", files).parent,
        "archive": lambda: archive(tmp_path / "any.tar.gz", files),
        "archive in folder": lambda: archive(tmp_path / "cifar-10-binary.tar.gz", files).parent,
    }[form]()
    train, validation = read_images(CIFAR10, data)
    assert train.pixels.shape == (5 * PER_FILE, 3, 32, 32)
    assert train.labels.tolist() == [(number + row) % 10 for number in range(5) for row in range(PER_FILE)]
    assert train.pixels[5, :, 3, 30].tolist() == [11, 12, 13]
    assert validation.pixels[:, 0, 0, 0].tolist() == [50, 51, 52, 53]
    assert validation.labels.tolist() == [5, 6, 7, 8]


def test_cifar_100_has_the_fine_label(tmp_path: Path) -> None:
    files = {name: cifar_record(93, 7, coarse=4) * 2 for name in ("train.bin", "test.bin")}
    train, _ = read_images(CIFAR100, put(tmp_path, files))
    assert train.labels.tolist() == [93, 93]
    assert train.pixels[1, 2, 31, 31] == 9


@pytest.mark.parametrize("compress", [False, True])
def test_mnist_is_read_byte_for_byte(tmp_path: Path, compress: bool) -> None:
    train, validation = read_images(MNIST, put(tmp_path, mnist_files(), compress=compress))
    assert train.pixels.shape == (6, 1, 28, 28)
    assert train.pixels.ravel().tolist() == [number % 251 for number in range(6 * 784)]
    assert validation.labels.tolist() == [0, 1, 2]


def test_files_that_cannot_be_used_are_named_with_offset_and_expectation(tmp_path: Path) -> None:
    def refused(of: ImageSet, files: dict[str, bytes], words: str) -> None:
        folder = put(tmp_path / str(len(list(tmp_path.iterdir()))), files)
        with pytest.raises(DataFileError, match=words) as caught:
            read_images(of, folder)
        assert isinstance(caught.value, TaskError)  # ends the worker with code 6

    whole, idx = cifar10_files(), mnist_files()
    second = "data_batch_2.bin"
    refused(
        CIFAR10, {**whole, second: whole[second][:-1]}, r"data_batch_2.bin: at byte 9219: expected records"
    )
    refused(CIFAR10, {**whole, second: b""}, r"at byte 0: expected records of 3073 bytes")
    bad = whole[second][:3073] + b"\x0a" + whole[second][3074:]
    refused(CIFAR10, {**whole, second: bad}, "at byte 3073: expected a label from 0 to 9, got 10")
    refused(CIFAR10, {name: whole[name] for name in whole if name != second}, f"expected the file {second}")
    pickled = {name.removesuffix(".bin"): b"" for name in whole}
    refused(CIFAR10, pickled, "pickled version of cifar10.*download cifar-10-binary.tar.gz")
    labels, images = "train-labels-idx1-ubyte", "train-images-idx3-ubyte"
    refused(
        MNIST, {**idx, images: b"\0\0\x08\x01" + idx[images][4:]}, "byte 0: expected the magic number 2051"
    )
    refused(MNIST, {**idx, images: idx[images][:-3]}, "at byte 4717: expected the end of 4720 bytes")
    refused(MNIST, {**idx, labels: idx[labels][:6]}, "at byte 6")
    refused(
        MNIST, {**idx, labels: idx[labels].replace(b"\0\0\0\x06", b"\0\0\0\x07", 1)}, "expected the size 6"
    )
    refused(MNIST, {**idx, labels: idx[labels][:-1] + b"\x0b"}, "at byte 13: expected a label from 0 to 9")
    refused(MNIST, mnist_files(side=27), "at byte 8: expected the size 28, got 27")


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_compressed_files_that_are_damaged_are_named(tmp_path: Path, how: str) -> None:
    folder = put(tmp_path, mnist_files(), compress=True)
    path = folder / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    if how == "cut":
        content = content[:-20]
    else:
        content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataFileError, match=r"train-images-idx3-ubyte.gz: at byte \d+ of the content"):
        read_images(MNIST, folder)
    damaged = tmp_path / "c.tar.gz"
    damaged.write_bytes(archive(tmp_path / "whole.tar.gz", cifar10_files()).read_bytes()[:300])
    with pytest.raises(DataFileError, match=r"c.tar.gz: .*data_batch_\d.bin"):
        read_images(CIFAR10, damaged)
    flipped = bytearray((tmp_path / "whole.tar.gz").read_bytes())
    flipped[-8] ^= 1  # of the checksum, behind all members
    damaged.write_bytes(flipped)
    with pytest.raises(DataFileError, match=r"c.tar.gz: at data_batch_1.bin: cannot be read: CRC check"):
        read_images(CIFAR10, damaged)
    (tmp_path / "page.tar.gz").write_text("<html>")
    with pytest.raises(DataFileError, match=r"page.tar.gz: .*: expected a folder, or a whole tar archive"):
        read_images(CIFAR10, tmp_path / "page.tar.gz")
    with tarfile.open(tmp_path / "link.tar", "w") as dangling:
        link = tarfile.TarInfo("data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "nowhere"
        dangling.addfile(link)
    with pytest.raises(DataFileError, match=r"link.tar: at data_batch_1.bin: cannot be read"):
        read_images(CIFAR10, tmp_path / "link.tar")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cifar10", "expected data=PATH; download cifar-10-binary.tar.gz (MD5 c32a1d4a"),
        ("mnist:data=/nowhere", "/nowhere: expected the file train-images-idx3-ubyte; download"),
        ("cifar10:data=x,synthetic=20", "expected one of them"),
        ("cifar100:synthetic=20", "expected 100 to 1000000, got 20"),
        ("mnist:synthetic=20,split=classes:0", "expected classes:K with 1 to 1000 shards"),
        ("digits:split=uneven", "expected classes:K"),
    ],
)
def test_options_that_make_no_task_are_refused(spec: str, words: str) -> None:
    with pytest.raises(TaskError, match=re.escape(words)):
        load(spec)
    if "nowhere" not in spec:
        with pytest.raises(TaskSpecError):
            load(spec)


@pytest.mark.parametrize("of", [CIFAR10, CIFAR100, MNIST], ids=lambda of: of.name)
def test_made_images_have_the_format_and_every_class(tmp_path: Path, of: ImageSet) -> None:
    count = 230
    files = dict(synthetic(of, count, seed=0))
    validation = synthetic(of, 100, seed=1)
    files |= {name: content for name, (_, content) in zip(of.validation, validation, strict=False)}
    train, _ = read_images(of, put(tmp_path, files))
    assert len(train.labels) == count
    assert set(train.labels.tolist()) == set(range(of.classes))


def test_augmentation_crops_and_reflects_each_image_alone() -> None:
    images = torch.arange(2 * 3 * 32 * 32, dtype=torch.float32).view(2, 3, 32, 32) + 1
    torch.manual_seed(0)
    padded = torch.nn.functional.pad(images, (4,) * 4)
    seen = set[tuple[int, int, bool]]()
    for _ in range(200):
        for image, source in zip(augmented(images, reflect=True), padded, strict=True):
            for row, column in ((r, c) for r in range(9) for c in range(9)):
                crop = source[:, row : row + 32, column : column + 32]
                for reflected in (False, True):
                    if torch.equal(image, crop.flip(2) if reflected else crop):
                        seen.add((row, column, reflected))
                        break
    assert len(seen) > 120  # of 162
    torch.manual_seed(1)
    first = augmented(images, reflect=True)
    torch.manual_seed(1)
    assert torch.equal(first, augmented(images, reflect=True))


def test_made_images_can_be_learned() -> None:
    task = load("cifar10:synthetic=500,augment=off")
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = np.random.default_rng(0).permutation(500)
    for start in range(0, 500, 50):
        optimizer.zero_grad()
        task.loss(model, task.batch(order[start : start + 50])).backward()
        optimizer.step()
    assert task.evaluate(model)["accuracy"] > 0.3  # chance is 0.1
