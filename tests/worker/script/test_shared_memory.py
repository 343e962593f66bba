"""Models whose parameters share memory before `attach`: with each other, or with something else."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from safetensors import torch as safetensors_torch
from stepping_server import INPUTS, RATE, Network, SteppingServer, flat, joined, train
from torch import nn
from torch.nn.utils import spectral_norm
from torch.optim.swa_utils import AveragedModel

from gradwire.proto.messages import EntryKind
from gradwire.worker.session.groups import ParameterGroups
from gradwire.worker.session.replica import ModelError, Replica

How = Literal["off", "both", "local"]
HOWS: tuple[How, ...] = ("off", "both", "local")
Seen = Callable[[], Any]  # the present values of what shares the memory of hidden.weight


def numpy_view(model: Network) -> Seen:
    view = model.hidden.weight.detach().numpy()
    return lambda: view


def from_numpy(model: Network) -> Seen:
    array = model.hidden.weight.detach().numpy().copy()
    model.hidden.weight = nn.Parameter(torch.from_numpy(array))
    return lambda: array


def outside_tensor(model: Network) -> Seen:
    outside = model.hidden.weight.detach().t()
    return lambda: outside.t()


def other_model(model: Network) -> Seen:
    other = nn.Linear(5, 3)
    other.weight.data = model.hidden.weight.data
    return lambda: other.weight.detach()


def state_dict_kept(model: Network) -> Seen:
    kept = model.state_dict()
    return lambda: kept["hidden.weight"]


def columns(model: Network) -> Seen:
    """Parameters that are no contiguous memory."""
    both = torch.zeros(3, 9)
    both[:, :5] = model.hidden.weight.data
    model.hidden.weight.data = both[:, :5]
    return lambda: both[:, :5]


def buffer(model: Network) -> Seen:
    model.hidden.register_buffer("target", model.hidden.weight.data)
    return lambda: model.hidden.target


def part_as_buffer(model: Network) -> Seen:
    first = model.hidden.weight.data[:1]
    model.hidden.register_buffer("first", first, persistent=False)
    return lambda: torch.cat([first, model.hidden.weight[1:].detach()])


def frozen(model: Network) -> Seen:
    model.hidden.fixed = nn.Parameter(model.hidden.weight.data, requires_grad=False)
    return lambda: model.hidden.fixed.data


def other_process(model: Network) -> Seen:
    """Map the memory a second time, as another process does."""
    model.share_memory()
    storage: Any = model.hidden.weight.untyped_storage()
    kind: Any = torch.UntypedStorage
    mapped = kind._new_shared_fd_cpu(*storage._share_fd_cpu_())
    empty: Any = torch.empty(0)
    view = empty.set_(mapped, 0, (3, 5))
    return lambda: view


KEPT = [
    numpy_view,
    from_numpy,
    outside_tensor,
    other_model,
    state_dict_kept,
    columns,
    buffer,
    part_as_buffer,
    frozen,
    other_process,
]


def trained(monkeypatch: pytest.MonkeyPatch, how: How, network: Network) -> SteppingServer:
    server = SteppingServer(1.0 if how == "local" else RATE, overlap="off" if how == "local" else how)
    with joined(monkeypatch, server) as job:
        options: dict[str, Any] = {"steps": "local"} if how == "local" else {}
        train(job, lambda step, model: None, network=network, with_frozen=False, **options)
    return server


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("share", KEPT)
def test_what_shares_memory_with_a_parameter_is_trained_with_it(
    share: Callable[[Network], Seen],
    how: How,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone, network = Network(), Network()
    seen = share(network)
    at = network.hidden.weight.data_ptr()
    trained(monkeypatch, how, alone)
    trained(monkeypatch, how, network)
    assert network.hidden.weight.data_ptr() == at
    assert torch.equal(network.hidden.weight, alone.hidden.weight)
    assert not torch.equal(network.hidden.weight, Network().hidden.weight)
    assert np.array_equal(seen(), alone.hidden.weight.detach().numpy())
    assert not [each for each in caplog.messages if "memory" in each or "written" in each]


def _replace(model: Network, other: nn.Module) -> None:
    """Take over the parameters of a model that was loaded."""
    model.load_state_dict(other.state_dict(), assign=True)


def one_parameter_twice(model: Network) -> Any:
    model.other = model.hidden


def unpickled(model: Network) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    _replace(model, torch.load(file, weights_only=False))


def checkpoint_mapped(model: Network, folder: Path) -> Any:
    torch.save(model.state_dict(), folder / "model.pt")
    loaded = torch.load(folder / "model.pt", mmap=True)
    model.load_state_dict(loaded, assign=True)
    return loaded


def safetensors_assigned(model: Network, folder: Path) -> Any:
    any_safetensors: Any = safetensors_torch
    any_safetensors.save_file(model.state_dict(), folder / "model.safetensors")
    loaded: Any = any_safetensors.load_file(folder / "model.safetensors")
    model.load_state_dict(loaded, assign=True)
    return loaded


def one_flat_buffer(model: Network) -> Any:
    flattened, at = torch.cat([each.detach().reshape(-1) for each in model.parameters()]), 0
    for each in model.parameters():
        each.data = flattened[at : at + each.numel()].view_as(each)
        at += each.numel()


def interleaved_columns(model: Network) -> Any:
    both = torch.cat([model.hidden.weight.data, model.head.weight.data.t()], 1)
    model.hidden.weight.data, model.head.weight.data = both[:, :5], both[:, 5:].t()


def deep_copied(model: Network) -> Any:
    model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)


def averaged(model: Network) -> Any:
    return AveragedModel(model)


def pass_before(model: Network) -> Any:
    return model(INPUTS).sum()  # its graph still lives


def channels_last(model: Network) -> Any:
    any_model: Any = model
    any_model.to(memory_format=torch.channels_last)
    return model.state_dict()


def old_spectral_norm(model: Network) -> Any:
    spectral_norm(model.hidden)


ORDINARY = [
    one_parameter_twice,
    unpickled,
    checkpoint_mapped,
    safetensors_assigned,
    one_flat_buffer,
    interleaved_columns,
    deep_copied,
    averaged,
    pass_before,
    channels_last,
    old_spectral_norm,
]


@pytest.mark.parametrize("how", ["both", "local"])
@pytest.mark.parametrize("prepare", ORDINARY)
def test_ordinary_models_are_trained_without_a_word(
    prepare: Callable[..., Any],
    how: How,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = Network()
    needs_folder = prepare.__code__.co_argcount == 2
    held = prepare(network, tmp_path) if needs_folder else prepare(network)
    server = trained(monkeypatch, how, network)
    del held
    named = {name: each for name, each in network.named_parameters() if each.requires_grad}
    ours = torch.cat([each.detach().reshape(-1) for each in named.values()])
    assert ours.tolist() == server.values.tolist()
    assert not [each for each in caplog.messages if "memory" in each or "written" in each]


def test_a_model_may_be_attached_again_after_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    trained(monkeypatch, "off", network)
    fresh = copy.deepcopy(network)
    again = trained(monkeypatch, "off", network)
    assert again.values.tolist() == trained(monkeypatch, "off", fresh).values.tolist()
    assert flat(network).tolist() == flat(fresh).tolist()


def tied_by_data(model: Network) -> None:
    model.hidden.weight.data = cast(Any, model.rnn.weight_hh_l0).data[:3]


def tied_wholly(model: Network) -> None:
    model.other = nn.Linear(5, 3)
    model.other.weight.data = model.hidden.weight.data


def one_array_twice(model: Network) -> None:
    """Two storages on one memory."""
    array = np.zeros((3, 5), np.float32)
    model.other = nn.Linear(5, 3)
    for layer in (model.other, model.hidden):
        layer.weight = nn.Parameter(torch.from_numpy(array))


def expanded(model: Network) -> None:
    model.hidden.weight.data = torch.zeros(1, 5).expand(3, 5)


@pytest.mark.parametrize("how", ["off", "local"])
@pytest.mark.parametrize(
    ("share", "said"),
    [
        (
            tied_wholly,
            "'hidden.weight' and 'other.weight' share their memory.*model.b.weight = model.a.weight",
        ),
        (tied_by_data, "'rnn.weight_hh_l0' and 'hidden.weight' share a part of their memory.*p.data.clone()"),
        (one_array_twice, "'hidden.weight' and 'other.weight' share their memory"),
        (expanded, "'hidden.weight', of shape .3, 5.: several of its elements are the same memory"),
    ],
)
def test_two_parameters_on_one_memory_are_refused_at_attach(
    share: Callable[[Network], None], said: str, how: How, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network()
    share(network)
    steps: Any = "local" if how == "local" else "server"
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    with joined(monkeypatch, SteppingServer()) as job, pytest.raises(ModelError, match=said):
        job.attach(network, optimizer, steps=steps)


def test_what_is_a_trained_parameter_under_another_name_is_saved_as_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If it were uploaded and written back as a buffer, an evaluation would undo the last steps."""
    network = Network()
    network.hidden.register_buffer("target", network.hidden.weight.data)
    network.hidden.register_buffer("row", network.hidden.weight.data[:1])
    network.hidden.register_buffer("own", torch.ones(3))
    entries = {each.name: each for each in Replica(network, 4).state.entries}
    assert (entries["hidden.target"].kind, entries["hidden.target"].tied_to) == (
        EntryKind.TIED,
        "hidden.weight",
    )
    assert entries["hidden.own"].kind is EntryKind.BUFFER
    assert "hidden.row" not in entries
    assert re.search("'hidden.row' .* parts of trained parameters, so the server's --output", caplog.text)


def test_workers_that_step_their_replica_may_share_its_memory() -> None:
    """In coded mode the optimizer writes to the parameters, and the checksum covers the buffer."""
    model = nn.Linear(3, 2)
    view = model.weight.detach()
    subject = Replica(model, 4, ParameterGroups())
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(2.0)
    subject.version = 1
    values = np.concatenate([each.view(np.float32) for each in subject.values()])
    assert values.tolist() == [2.0] * 8
    assert view.tolist() == [[2.0] * 3] * 2
