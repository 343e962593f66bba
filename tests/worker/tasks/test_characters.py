"""The task `characters`: which text, which of it trains, and what cannot be trained on."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradwire.worker.tasks import Task, TaskSpecError, load
from gradwire.worker.tasks.characters import ALPHABET

SMALL = "context=16,layers=1,width=32"


def of_file(tmp_path: Path, text: bytes, options: str = SMALL) -> Task:
    (tmp_path / "text").write_bytes(text)
    return load(f"characters:data={tmp_path / 'text'},{options}")


def as_bytes(characters: Tensor) -> bytes:
    return characters.to(torch.uint8).numpy().tobytes()


def everything(task: Task) -> bytes:
    """Return the training text, end to end."""
    windows: Tensor = task.batch(np.arange(task.train_samples))
    return as_bytes(windows[:, :-1])


class Always(nn.Module):
    """Expects one character, whatever came before."""

    def __init__(self, character: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(10.0 * nn.functional.one_hot(torch.tensor(character), ALPHABET))

    def forward(self, text: Tensor) -> Tensor:
        return self.scores.expand(*text.shape, ALPHABET)


def test_a_sample_is_a_window_and_the_characters_that_follow(tmp_path: Path) -> None:
    text = bytes(place % 251 for place in range(4000))
    windows: Tensor = of_file(tmp_path, text).batch(np.array([0, 3]))
    assert windows.dtype == torch.int64
    assert [*map(as_bytes, windows)] == [text[:17], text[48:65]]


def test_the_last_twentieth_validates_and_is_not_trained_on(tmp_path: Path) -> None:
    task = of_file(tmp_path, b"ab" * 1900 + b"z" * 200)
    assert everything(task) == b"ab" * (237 * 8)
    with torch.no_grad():
        assert task.evaluate(Always(ord("z")))["accuracy"] == 1.0
        assert task.evaluate(Always(ord("a")))["accuracy"] == 0.0


def test_the_files_of_a_folder_follow_in_the_order_of_their_paths(tmp_path: Path) -> None:
    files = {"b/two": "2", "a.txt": "1", "c": "3", ".git/config": "x", "b/.two": "x"}
    for name, character in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(character * 500)
    text = everything(load(f"characters:data={tmp_path},{SMALL}"))
    assert text == b"1" * 500 + b"2" * 500 + b"3" * (len(text) - 1000)
    cut = load(f"characters:data={tmp_path},characters=600,{SMALL}")
    assert everything(cut) == b"1" * 500 + b"2" * (cut.train_samples * 16 - 500)


def test_a_split_by_classes_divides_the_text_in_the_order_of_files(tmp_path: Path) -> None:
    """File b is the last that trains: characters 0 to 499 are a, to 999 b, and the rest validates."""
    for name, length in (("a", 500), ("b", 500), ("c", 52)):
        (tmp_path / name).write_text(name * length)
    task = load(f"characters:data={tmp_path},split=classes:1,{SMALL}")
    assert task.split is not None
    np.testing.assert_array_equal(task.split.labels, [0] * 32 + [1] * 30)  # sample 31 begins in file a
    shares = [task.split.share(position, 2) for position in range(2)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(task.train_samples))
    for share in shares:
        assert share.tolist() in (list(range(31)), list(range(31, 62)))
    assert load(f"characters:data={tmp_path},{SMALL}").split is None
    with pytest.raises(TaskSpecError, match=r"characters.*split: expected classes:K"):
        load(f"characters:data={tmp_path},split=files,{SMALL}")


def test_by_default_it_reads_the_standard_library() -> None:
    task = load("characters")
    assert task.train_samples == (950_000 - 1) // 64
    first = Path(sysconfig.get_path("stdlib"), "abc.py").read_bytes()
    assert everything(task).startswith(first)
    parameters = sum(parameter.numel() for parameter in task.model().parameters())
    assert parameters == 437_760


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("data=/nowhere/at-all", "option data: [Errno 2] No such file or directory: '/nowhere/at-all'"),
        ("characters=1000", "expected at least 1300 characters for context=64, got 1000;"),
        ("width=40", "option width: expected a multiple of 32, got 40"),
        ("width=0", "option width: expected 1 to 4096, got 0"),
        ("layers=-1", "option layers: expected 1 to 64, got -1"),
        ("context=0", "option context: expected 1 to 4096, got 0"),
    ],
)
def test_what_cannot_be_trained_on_is_said(options: str, words: str) -> None:
    with pytest.raises(TaskSpecError, match=re.escape(words)):
        load(f"characters:{options}")


def test_an_empty_file_and_an_empty_folder_are_too_little(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(TaskSpecError, match="got 0 in "):
        load(f"characters:data={tmp_path / 'folder'}")
    with pytest.raises(TaskSpecError, match="got 0 in "):
        of_file(tmp_path, b"")


def test_a_character_does_not_see_those_that_follow() -> None:
    task = load(f"characters:characters=20000,{SMALL}")
    torch.manual_seed(1)
    model, windows = task.model(), task.batch(np.arange(2))[:, :-1]
    changed = windows.clone()
    changed[:, 9:] = 7
    scores, others = model(windows), model(changed)
    torch.testing.assert_close(scores[:, :9], others[:, :9])
    assert not torch.allclose(scores[:, 9:], others[:, 9:])
