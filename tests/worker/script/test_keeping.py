"""What a script finds again: values, objects, random numbers, and its place in a loader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gradwire.storage.checkpoint import read_folder, write_folder
from gradwire.storage.values import pack, unpack
from gradwire.worker.script.optimizer import JobOptimizer
from gradwire.worker.script.script_state import Position, State, random_state, restore_random_state
from gradwire.worker.script.terms import ScriptError


def again(tree: Any) -> Any:
    """As it comes back from a folder."""
    tensors: dict[str, torch.Tensor] = {}
    plain = pack(tree, tensors)
    return unpack(plain, {name: each.clone() for name, each in tensors.items()})


def test_values_and_objects_are_found_again() -> None:
    state = State({})
    layer = nn.Linear(2, 2)
    generator = torch.Generator().manual_seed(7)
    state["layer"], state["generator"] = layer, generator
    state["best"], state["seen"] = 0.5, {"a": [1, 2], "mean": torch.ones(2)}
    torch.rand(3, generator=generator)
    image = state.image()
    expected, weight = torch.rand(3, generator=generator), layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1)  # of which the image knows nothing
    state["best"] = 0.7

    found = State(again(image))
    assert set(found) == {"layer", "generator", "best", "seen"}
    assert len(found) == 4
    assert found.get("best", 0.0) == 0.5
    assert found["seen"]["a"] == [1, 2]
    other, numbers = nn.Linear(2, 2), torch.Generator()
    found["layer"], found["generator"] = other, numbers
    assert torch.equal(other.weight, weight)
    assert torch.equal(torch.rand(3, generator=numbers), expected)
    assert torch.equal(again(found.image())["seen"]["mean"], torch.ones(2)), "what nobody asked for stays"
    fresh = nn.Linear(2, 2)
    before = fresh.weight.clone()
    found["layer"] = fresh
    assert torch.equal(fresh.weight, before), "an object is brought to where it was once"
    del found["layer"], found["seen"]
    assert set(found) == {"generator", "best"}
    with pytest.raises(KeyError):
        del found["layer"]


def test_what_cannot_be_written_down_is_refused_by_name_and_changes_nothing() -> None:
    state = State({})
    state["loss"] = 1.0
    with pytest.raises(ScriptError, match=r"job.state\['loss'\]: .*keep plain values"):
        state["loss"] = nn.functional.mse_loss
    with pytest.raises(ScriptError, match=r"job.state\['complex'\]"):
        state["complex"] = {1j}
    assert dict(state) == {"loss": 1.0}


def test_tied_and_computed_tensors_are_written_down(tmp_path: Path) -> None:
    state = State({})
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    state["model"] = nn.Sequential(first, second)
    state["sums"] = [first.bias * 2]  # which has a graph
    write_folder(tmp_path / "a", state.image(), {})
    found = State(read_folder(tmp_path / "a")[0])
    assert torch.equal(found["model"]["1.weight"], first.weight)
    assert torch.equal(found["sums"][0], first.bias * 2)


def test_what_an_optimizer_remembered_does_not_change_with_its_next_steps() -> None:
    """It is written down on another thread; LBFGS has lists of tensors."""
    weight = nn.Parameter(torch.tensor([3.0, -2.0]))

    def pushes(*_: object) -> None:
        raise AssertionError("its own steps alone")

    optimizer = JobOptimizer(torch.optim.LBFGS([weight], max_iter=3), pushes, here=True)

    def step() -> None:
        def evaluate() -> torch.Tensor:
            weight.grad = None
            loss = (weight**4).sum()
            loss.backward()
            return loss

        optimizer.step_here(evaluate)

    step()
    remembered = optimizer.copy_state()
    before = repr(remembered)
    assert remembered[0]["old_dirs"]
    step()
    assert repr(remembered) == before


def drawn() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_random_numbers_go_on() -> None:
    state = again(random_state())
    expected = drawn()
    drawn()
    restore_random_state(state)
    assert drawn() == expected


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(())  # as augmentation draws some


@pytest.mark.parametrize("own", [True, False], ids=["generator of its own", "global numbers"])
@pytest.mark.parametrize("taken", [1, 4, 5, 7])
def test_a_loader_goes_on_where_it_was(own: bool, taken: int) -> None:
    """Five batches are a pass; so the last two are taken of it, or of the next one."""

    def loader(seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed) if own else None
        return DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator)

    def seen(batches: Iterator[Any], count: int) -> list[Any]:
        return [(indices.tolist(), values.tolist(), drawn()) for indices, values in islice(batches, count)]

    torch.manual_seed(1)
    position = Position(None)
    with position.iterate(loader(2)) as batches:
        seen(batches, taken)
        image, state = again(position.image()), again(random_state())
        expected = seen(batches, 6)

    torch.manual_seed(100)
    drawn()
    position = Position(image)
    with position.iterate(loader(200 if own else 2)) as batches:
        assert position.image() is not None, "it is there before a batch is asked for"
        restore_random_state(state)
        assert seen(batches, 6) == expected


def test_between_two_passes_there_is_no_place_to_be_found_again() -> None:
    position = Position(None)
    assert position.image() is None
    with position.iterate([1, 2, 3]) as batches:
        assert next(batches) == 1
        assert position.image() is not None
    assert position.image() is None


def test_a_loader_without_batches_is_refused() -> None:
    with Position(None).iterate([]) as batches, pytest.raises(ScriptError, match="the loader has no batches"):
        next(batches)
