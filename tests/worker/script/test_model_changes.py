"""Changes of a script to its model between two steps: a test for each row of the table in
docs/reference/scripts.md."""

from __future__ import annotations

import copy
import io
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from stepping_server import INPUTS, RATE, Network, SteppingServer, flat, joined, train, unheard
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

from gradwire.proto import replicas
from gradwire.worker.session.replica import ModelError

DOCS = Path(__file__).parents[3] / "docs"
HEADING = "\n## What a script may do to its model\n"
CHANGES_AT = 2  # the step
Outcome = Literal["works", "works, with a warning", "is refused"]
How = Literal["off", "backward", "both", "early", "local"]
HOWS: tuple[How, ...] = ("off", "backward", "both", "early", "local")


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: its first column.
        change: what the script does.
        said: what the warning or the error says.
        same: whether the parameters are in the end what they are if the script does nothing.
    """

    name: str
    outcome: Outcome
    change: Callable[[Network], nn.Module | None]
    said: str = ""
    same: bool = True


# ---- what scripts do


def swapped_by_copy(model: Network) -> None:
    """Swap parameters like torch_ema."""
    kept = [each.detach().clone() for each in model.parameters()]
    for each in model.parameters():
        each.data.copy_(each.data * 0.5)
    for each, value in zip(model.parameters(), kept, strict=True):
        each.data.copy_(value)


def swapped(model: Network) -> None:
    kept = [each.data for each in model.parameters()]
    for each in model.parameters():
        each.data = each.data * 0.5
    for each, value in zip(model.parameters(), kept, strict=True):
        each.data = value.clone()


def averaged(model: Network) -> None:
    average = AveragedModel(model)
    average.update_parameters(model)
    before = flat(average)
    average(INPUTS).sum().backward()  # is no pass of the job's
    assert before.tolist() == flat(average).tolist() == flat(model).tolist()


def deep_copied(model: Network) -> None:
    other = copy.deepcopy(model)
    other(INPUTS).sum().backward()
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()


def saved(model: Network) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    torch.save(model.state_dict(), io.BytesIO())
    file.seek(0)
    other = torch.load(file, weights_only=False)
    other(INPUTS).sum().backward()
    assert not other._forward_hooks
    assert "__getstate__" not in vars(other)
    assert flat(other).tolist() == flat(model).tolist()


def with_storages_of_their_own(model: Network) -> None:
    """Check what such writers tell tied tensors by."""
    state = model.state_dict()
    assert [each.untyped_storage().nbytes() for each in state.values()] == [
        each.nbytes for each in state.values()
    ]
    addresses = {name: each.data_ptr() for name, each in model.state_dict(keep_vars=True).items()}
    assert addresses == {name: each.data_ptr() for name, each in state.items()}


def compiled(model: Network) -> nn.Module:
    return cast(nn.Module, torch.compile(model, backend="eager"))


def compiled_in_place(model: Network) -> None:
    model.compile(backend="eager")


def thawed(model: Network) -> None:
    model.head.bias.requires_grad_(True)
    model.hidden.requires_grad_(False)


def here_already(model: Network) -> None:
    model.to("cpu").float().rnn.flatten_parameters()


def shared(model: Network) -> None:
    model.share_memory()


def halved(model: Network) -> None:
    model.half().float()


def doubled(model: Network) -> None:
    model.double().float()


def channels_last(model: Network) -> None:
    any_model: Any = model  # its types lack the argument
    any_model.to(memory_format=torch.channels_last)


def flattened(model: Network) -> None:
    """Flatten like cuDNN: the weights of a recurrent layer in a piece of memory of their own."""
    parameters = list(model.rnn.parameters())
    chunk, at = torch.cat([each.detach().reshape(-1) for each in parameters]), 0
    for each in parameters:
        each.data = chunk[at : at + each.numel()].view_as(each)
        at += each.numel()
    if torch.cuda.is_available():
        model.cuda()
        model.rnn.flatten_parameters()
        model.cpu()


def replaced(model: Network) -> None:
    for each in model.hidden.parameters():
        each.data = each.data * 2


def pruned_for_good(model: Network) -> None:
    pruned(model)
    prune.remove(model.hidden, "weight")


def loaded(model: Network) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def clamped(model: Network) -> None:
    with torch.no_grad():
        model.hidden.weight.clamp_(-0.1, 0.1)


def pruned(model: Network) -> None:
    prune.l1_unstructured(model.hidden, "weight", 0.3)  # pyright: ignore[reportUnknownMemberType]


def frozen_added(model: Network) -> None:
    model.hidden.register_parameter("scale", nn.Parameter(torch.ones(3), requires_grad=False))


def assigned(model: Network) -> None:
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)


def tied(model: Network) -> None:
    model.head.weight = model.embedding.weight


def exchanged(model: Network) -> None:
    """Exchange parameters like LoRA and FSDP."""
    base, model.hidden = model.hidden, nn.Sequential(nn.Linear(5, 3))  # type: ignore[assignment]
    base.requires_grad_(False)


def parametrized(model: Network) -> None:
    parametrizations.weight_norm(model.hidden)


def grown(model: Network) -> None:
    model.added = nn.Linear(3, 3)


def half(model: Network) -> None:
    model.half()


def elsewhere(model: Network) -> None:
    model.to("cuda" if torch.cuda.is_available() else "meta")


def resized(model: Network) -> None:
    model.hidden.weight.data = model.hidden.weight.data[:2]
    model.hidden.bias.data = model.hidden.bias.data[:2]
    model.head.weight.data = model.head.weight.data[:, :2]


def loads_before(model: Network) -> None:
    """Before the first batch there is no step to disturb; see the test of its own."""


POINTED_BACK = r"has pointed the data of .* elsewhere"
PUT_BACK = r"has replaced the values of '.*the job's values are restored"
WRITTEN = r"has written to '.*does not hear of that"
ROWS = [
    Row("`load_state_dict(…)` before the first batch", "works", loads_before),
    Row("`copy.deepcopy(model)`", "works", deep_copied),
    Row("`torch.save(model)`, `pickle`", "works", saved),
    Row("`save_model` of safetensors, `save_state` of Accelerate", "works", with_storages_of_their_own),
    Row("`torch.optim.swa_utils.AveragedModel(model)`", "works", averaged),
    Row("averages swapped in by `p.data.copy_(…)`, and back", "works", swapped_by_copy),
    Row("`torch.compile(model)` after `attach`", "works", compiled),
    Row("`model.compile()` after `attach`", "works", compiled_in_place),
    Row("`requires_grad_` of what the optimizer has", "works", thawed, same=False),
    Row("`to`, `cpu`, `float` without effect", "works", here_already),
    Row("`model.share_memory()`", "works", shared),
    Row("averages swapped in by `p.data = …`, and back", "works, with a warning", swapped, POINTED_BACK),
    Row("`model.double(); model.float()`", "works, with a warning", doubled, POINTED_BACK),
    Row("`model.half(); model.float()`", "works, with a warning", halved, PUT_BACK),
    Row(
        "`model.to(memory_format=torch.channels_last)`", "works, with a warning", channels_last, POINTED_BACK
    ),
    Row(
        "`flatten_parameters()` on a GPU, `cuda()` and back", "works, with a warning", flattened, POINTED_BACK
    ),
    Row("`p.data = …` with other values", "works, with a warning", replaced, PUT_BACK),
    Row("`torch.nn.utils.prune.remove`", "works, with a warning", pruned_for_good, PUT_BACK, same=False),
    Row("`load_state_dict(…)`", "works, with a warning", loaded, WRITTEN, same=False),
    Row("`p.copy_`, `p.clamp_`", "works, with a warning", clamped, WRITTEN, same=False),
    Row(
        "`torch.nn.utils.prune`",
        "works, with a warning",
        pruned,
        "'hidden.weight' is 'hidden.weight_orig'",
        False,
    ),
    Row(
        "a frozen parameter is added",
        "works, with a warning",
        frozen_added,
        "'hidden.scale': added to the model",
    ),
    Row(
        "`load_state_dict(…, assign=True)`",
        "is refused",
        assigned,
        "'embedding.weight' is another tensor now",
    ),
    Row("weights are tied", "is refused", tied, "'head.weight' is not in the model any more"),
    Row(
        "modules are replaced: LoRA, FSDP",
        "is refused",
        exchanged,
        "'hidden.weight' is not in the model any more",
    ),
    Row(
        "`parametrizations.weight_norm`",
        "is refused",
        parametrized,
        "'hidden.weight' is not in the model any",
    ),
    Row(
        "a parameter is added",
        "is refused",
        grown,
        "'added.weight' was added to the model after the job began",
    ),
    Row(
        "`model.half()`, `model.bfloat16()`",
        "is refused",
        half,
        "was float32 when the job began, and is float16 now",
    ),
    Row("`model.cuda()` after `attach`", "is refused", elsewhere, "was on cpu when the job began, and is on"),
    Row(
        "`p.data` of another shape",
        "is refused",
        resized,
        "was of shape .* when the job began, and is of shape .* now",
    ),
]


def trained(
    monkeypatch: pytest.MonkeyPatch, how: How, change: Callable[[Network], nn.Module | None] | None
) -> tuple[SteppingServer, Network]:
    monkeypatch.setattr(replicas, "CHECK_EVERY", 2)
    overlap = "backward" if how in ("early", "local") else how
    server = SteppingServer(1.0 if how == "local" else RATE, overlap=overlap)

    def between(step: int, model: nn.Module) -> nn.Module | None:
        assert isinstance(model, Network)
        return change(model) if change is not None and step == CHANGES_AT else None

    with joined(monkeypatch, server) as job:
        options: dict[str, Any] = {"steps": "local"} if how == "local" else {}
        return server, train(job, between, early=how == "early", **options)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[float]]:
    """The parameters in the end if the script does nothing to them."""
    found: dict[str, list[float]] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for how in HOWS:
            server, network = trained(monkeypatch, how, None)
            assert flat(network).tolist() == server.values.tolist()
            found[how] = server.values.tolist()
    return found


@pytest.mark.parametrize(
    ("row", "how"),
    # Before a forward pass it is torch that refuses a model of which only a part has been converted.
    [
        (row, how)
        for row in ROWS
        for how in HOWS
        if how != "early" or row.change not in (half, elsewhere, resized)
    ],
    ids=lambda value: value.change.__name__ if isinstance(value, Row) else value,
)
def test_a_script_may_do_this_to_its_model(
    row: Row,
    how: How,
    undisturbed: dict[str, list[float]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "gradwire")
    if row.outcome == "is refused":
        with pytest.raises(ModelError, match=row.said) as raised:
            trained(monkeypatch, how, row.change)
        assert "before job.attach" in str(raised.value)
        return
    server, network = trained(monkeypatch, how, row.change)
    warned = [each for each in caplog.messages if "the server's optimizer begins anew" not in each]
    assert bool(warned) == (row.outcome == "works, with a warning"), warned
    assert re.search(row.said, "\n".join(warned))
    assert len({each.partition("'")[0] for each in warned}) == len(warned)  # each once
    in_order = {name.replace("_orig", ""): each for name, each in network.named_parameters()}
    in_order.pop("hidden.scale", None)
    names = [name for name, _ in Network().named_parameters()]
    ours = cast("list[float]", torch.cat([in_order[name].detach().reshape(-1) for name in names]).tolist())
    assert ours == server.values.tolist()
    if row.same and how != "early":
        assert ours == undisturbed[how]


def test_the_table_has_these_rows() -> None:
    table = (DOCS / "reference" / "scripts.md").read_text().split(HEADING)[1].split("\n## ")[0]
    listed = re.findall(r"^\| (.+?) \| (works|works, with a warning|is refused) \| ", table, re.M)
    assert listed == [(row.name, row.outcome) for row in ROWS]


@pytest.mark.parametrize("back", [True, False])
def test_averages_may_be_swapped_in_where_an_epoch_has_ended(
    back: bool,
    undisturbed: dict[str, list[float]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A script that forgets to swap them back trains at the job's parameters nevertheless, and is told."""
    with joined(monkeypatch, SteppingServer()) as job:
        model = Network()
        model.head.bias.requires_grad_(False)
        model, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=RATE))
        kept: list[torch.Tensor] = []
        for _ in job.epochs():
            for inputs in job.batches(INPUTS):
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            kept = [each.data for each in model.parameters()]
            for each in model.parameters():
                each.data = each.data * 0.5
            if back:
                for each, value in zip(model.parameters(), kept, strict=True):
                    each.data = value.clone()
        if not back:
            for each, value in zip(model.parameters(), kept, strict=True):
                each.data = value
    assert flat(model).tolist() == undisturbed["backward"]
    assert re.search(POINTED_BACK if back else PUT_BACK, "\n".join(caplog.messages))


def test_what_is_loaded_before_the_first_batch_is_what_the_job_begins_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = SteppingServer()
    with joined(monkeypatch, server) as job:
        model = Network()
        model, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=RATE))
        model.load_state_dict({name: torch.ones_like(each) for name, each in model.state_dict().items()})
        next(iter(job.batches(INPUTS)))
        assert set(server.values.tolist()) == {1.0}
        model(INPUTS[:4]).sum().backward()
        optimizer.step()
        assert flat(model).tolist() == server.values.tolist() != np.ones_like(server.values).tolist()


def test_what_the_optimizer_lacks_cannot_be_unfrozen(monkeypatch: pytest.MonkeyPatch) -> None:
    def thaw(step: int, model: nn.Module) -> None:
        model.requires_grad_(True)

    with (
        joined(monkeypatch, SteppingServer()) as job,
        pytest.raises(ModelError, match=r"'head\.bias' requires a gradient now .* give it to the optimizer"),
    ):
        train(job, thaw, with_frozen=False)


def test_a_saved_model_can_be_loaded_without_gradwire(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    with joined(monkeypatch, SteppingServer()) as job:
        model = nn.Sequential(nn.Linear(6, 4))
        passes: list[int] = []
        handle = model.register_forward_hook(unheard)  # a hook of the script's own stays
        model, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=RATE))
        for inputs in job.batches(INPUTS):
            model(inputs).square().mean().backward()
            if not passes:
                torch.save(model, file)
                passes.append(1)
            optimizer.step()
            optimizer.zero_grad()
    assert b"gradwire" not in file.getvalue()
    file.seek(0)
    assert list(torch.load(file, weights_only=False)._forward_hooks) == [handle.id]
