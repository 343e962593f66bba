"""The parameters: sync SGD on the union batch, one order of summation, and replicas that stay alike."""

from __future__ import annotations

import pytest
import torch
from pushes import Share, apply, bits, cut_plan, pushed, snapshot, take

from gradwire.compressors import LayerRule, ModelCompressor, PushTerms
from gradwire.optim.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Tensor
from gradwire.server.job.aggregation import Trimmed
from gradwire.server.shard.downlink import Downlink
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.pending import StepRules
from gradwire.server.shard.store import DivergedError
from gradwire.worker.session.replica import Replica

MODEL = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def manifest() -> Manifest:
    tensors = tuple(
        Tensor(name=name, shape=tuple(p.shape), dtype="float32") for name, p in MODEL.named_parameters()
    )
    return Manifest(tensors, 100)


def initial() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(p.shape, generator=generator) for p in MODEL.parameters()]


def store(optimizer: str = "sgd", downlink: str = "none", rate: float = 0.1) -> SteppedStore:
    options = parse_optimizer(optimizer)
    values = [value.clone().view(-1).numpy() for value in initial()]
    return SteppedStore(manifest(), values, downlink, lambda ps: Optimizer(options, ps, rate))


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(p.shape, generator=generator) for p in MODEL.parameters()]


SAMPLES = (32, 8, 17, 32)


def shares(step: int, compressors: list[ModelCompressor]) -> list[Share]:
    return [
        pushed(samples, compressor.compress(gradients(step, rank), samples, version=step))
        for rank, (samples, compressor) in enumerate(zip(SAMPLES, compressors, strict=True))
    ]


def compressors(spec: str) -> list[ModelCompressor]:
    return [ModelCompressor(manifest().specs, spec, LayerRule(), 1, rank) for rank in range(4)]


@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd",
        "sgd:momentum=0.9,weight_decay=0.01",
        "sgd:momentum=0.9,nesterov=on",
        "adam",
        "adamw:weight_decay=0.1",
        "adagrad",
    ],
)
def test_an_uncompressed_round_is_one_step_on_the_mean_over_all_samples(optimizer: str) -> None:
    ours, workers = store(optimizer), compressors("none")
    expected = [value.clone().requires_grad_() for value in initial()]
    reference = Optimizer(parse_optimizer(optimizer), expected, 0.1)
    for step in range(5):
        apply(ours, version=step + 1, shares=shares(step, workers))
        for index, parameter in enumerate(expected):
            sums = [gradients(step, rank)[index] * samples for rank, samples in enumerate(SAMPLES)]
            parameter.grad = torch.stack(sums).sum(0) / sum(SAMPLES)
        reference.step()
    for parameter, value in zip(ours.parameters, expected, strict=True):
        torch.testing.assert_close(parameter, value.detach(), rtol=1e-5, atol=1e-6)


def test_the_learning_rate_follows_the_factor() -> None:
    slow, fast = store(), store(rate=0.05)
    apply(slow, version=1, shares=shares(0, compressors("none")), rate_factor=0.5)
    apply(fast, version=1, shares=shares(0, compressors("none")))
    assert slow.sha256() == fast.sha256()


def test_fewer_gradients_than_the_aggregation_needs_change_nothing() -> None:
    ours = SteppedStore(
        manifest(),
        [value.clone().view(-1).numpy() for value in initial()],
        "none",
        lambda parameters: Optimizer(parse_optimizer("sgd"), parameters, 0.1),
        rules=StepRules(aggregation=Trimmed(wrong=1)),
    )
    given = shares(0, compressors("none"))
    before = ours.sha256()
    assert apply(ours, version=1, shares=given[:2]).passed_over == 2
    assert ours.sha256() == before
    assert apply(ours, version=2, shares=given[:3]).passed_over == 0
    assert ours.sha256() != before


def compensated(downlink: str) -> SteppedStore:
    return SteppedStore(
        manifest(),
        [value.clone().view(-1).numpy() for value in initial()],
        downlink,
        lambda parameters: Optimizer(parse_optimizer("sgd"), parameters, 0.1),
        rules=StepRules(delay_compensation=0.5),
    )


@pytest.mark.parametrize("downlink", ["none", "bf16"])
def test_a_late_gradient_is_corrected_by_how_far_the_parameters_have_moved(downlink: str) -> None:
    ours = compensated(downlink)
    base = [value.clone() for value in ours.replica]
    (fresh, late, *_) = shares(0, compressors("none"))
    apply(ours, version=1, shares=[fresh], base_version=0, bases=frozenset({0}))
    moved = [now - then for now, then in zip(ours.replica, base, strict=True)]
    before = [value.clone() for value in ours.parameters]
    apply(ours, version=2, shares=[late], base_version=0)
    for value, old, gradient, way in zip(ours.parameters, before, gradients(0, 1), moved, strict=True):
        expected = old - 0.1 * (gradient + 0.5 * gradient * gradient * way)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_a_correction_is_weighed_as_its_gradient_is() -> None:
    moves: list[list[torch.Tensor]] = []
    for weight in (1.0, 0.25):
        ours = compensated("none")
        (fresh, late, *_) = shares(0, compressors("none"))
        apply(ours, version=1, shares=[fresh], base_version=0, bases=frozenset({0}))
        before = [value.clone() for value in ours.parameters]
        apply(ours, version=2, shares=[late], base_version=0, weight=weight)
        moves.append([(now - old) / weight for now, old in zip(ours.parameters, before, strict=True)])
    for whole, weighed in zip(*moves, strict=True):
        torch.testing.assert_close(weighed, whole, rtol=1e-4, atol=1e-6)


def test_a_fresh_gradient_needs_no_correction() -> None:
    ours, plain = compensated("none"), store()
    for step, share in enumerate(shares(0, compressors("none"))):
        apply(ours, version=step + 1, shares=[share], base_version=step)
        apply(plain, version=step + 1, shares=[share], base_version=step)
    assert ours.sha256() == plain.sha256()


def test_only_versions_at_which_somebody_computes_are_kept() -> None:
    ours = compensated("none")
    given = shares(0, compressors("none"))
    for step in range(20):
        bases = frozenset({step, 3} if step >= 3 else {step})
        apply(ours, version=step + 1, shares=given[:1], base_version=step, bases=bases)
        assert len(ours._compensation.image()) <= 4  # pyright: ignore[reportPrivateUsage]
    apply(ours, version=21, shares=given[:1], base_version=3)


def test_a_round_without_samples_changes_nothing() -> None:
    ours = store("sgd:momentum=0.9,weight_decay=0.1")
    apply(ours, version=1, shares=shares(0, compressors("none")))
    before = ours.sha256()
    broadcast = apply(ours, version=2, shares=[pushed(0, ())])
    assert ours.sha256() == before
    assert (ours.version, broadcast.version) == (2, 2)


def replica() -> Replica:
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    made = Replica(model, 100)
    made.adopt(made.manifest.plan())
    return made


@pytest.mark.parametrize("downlink", ["none", "bf16", "fp16"])
def test_replicas_stay_alike_to_the_bit_also_the_late_ones(downlink: str) -> None:
    ours, workers = store("sgd:momentum=0.9", downlink), compressors("4bit")
    early, late = replica(), replica()
    take(early, snapshot(ours))
    for step in range(6):
        broadcast = apply(ours, version=step + 1, shares=shares(step, workers))
        assert broadcast.whole == (downlink == "none")
        take(early, broadcast)
        if step == 3:
            take(late, snapshot(ours))
        if step > 3:
            take(late, broadcast)
            assert bits(early) == bits(late)
        assert bits(early) == [p.detach().numpy().tobytes() for p in ours.replica]
    if downlink == "none":
        assert bits(early) == [each.numpy().tobytes() for each in ours.parameters]


@pytest.mark.parametrize("downlink", ["bf16", "fp16"])
def test_what_one_update_leaves_out_is_in_the_next(downlink: str) -> None:
    """The replica does not drift: after updates of nothing it is within one rounding of the parameters."""
    ours = store("sgd", downlink)
    for step in range(20):
        apply(ours, version=step + 1, shares=shares(step, compressors("none")))
    drift = max(float((p - r).abs().max()) for p, r in zip(ours.parameters, ours.replica, strict=True))
    assert 0 < drift < 1e-2
    for step in range(20, 24):
        apply(ours, version=step + 1, shares=[pushed(0, ())])
    drift = max(float((p - r).abs().max()) for p, r in zip(ours.parameters, ours.replica, strict=True))
    assert drift < 1e-7


def test_parameters_that_leave_the_range_of_floats_end_the_job() -> None:
    ours = store("sgd:weight_decay=100", rate=3e38)
    with pytest.raises(DivergedError, match=r"parameters of '.*' are no longer finite at version 1"):
        apply(ours, version=1, shares=shares(0, compressors("none")))


@pytest.mark.parametrize("downlink", ["none", "4bit", "auto"])
def test_a_step_that_fails_in_its_last_part_leaves_the_version_before_it(downlink: str) -> None:
    """Others have gone to the workers by then. A replica of its own needs no copy of that version."""
    values, options = [value.numpy().reshape(-1).copy() for value in initial()], parse_optimizer("sgd")
    plan = cut_plan((35,), (5,), (15,), (3,))
    ours = SteppedStore(
        manifest(),
        values,
        downlink,
        lambda ps: Optimizer(options, ps, 0.1),
        rules=StepRules(keep_last=downlink != "4bit"),
        plan=plan,
    )
    model = ModelCompressor(manifest().specs, "topk:ratio=4", LayerRule(), 1, 0, plan=plan)
    making, before = model.begin(PushTerms(samples=8, version=0)), list[torch.Tensor]()
    for version in range(1, 4):
        making = model.begin(PushTerms(samples=8, version=version))
        for place, given in enumerate(gradients(version, 0)):
            making.add(place, given * (1e38 if (version, place) == (3, 0) else 1))
        making.finish()
        before = [replica.clone() for replica in ours.replica]
        if version < 3:
            apply(ours, version=version, shares=[pushed(8, making.sent)])
    with pytest.raises(DivergedError):
        apply(ours, version=3, shares=[pushed(8, making.sent)], rate_factor=100.0)
    assert ours.version == 2
    assert all(map(torch.equal, ours.parameters, before))


@pytest.mark.parametrize("downlink", ["none", "4bit", "auto"])
@pytest.mark.parametrize("fault", ["diverges", "raises"])
def test_a_step_that_fails_leaves_the_version_before_it(
    downlink: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server can then write that version (finding F7)."""
    values = [value.numpy().reshape(-1).copy() for value in initial()]
    options = parse_optimizer("sgd:momentum=0.9")
    ours = SteppedStore(
        manifest(), values, downlink, lambda ps: Optimizer(options, ps, 0.1), rules=StepRules(keep_last=True)
    )
    workers = compressors("topk:ratio=4" if downlink == "auto" else "none")
    for number in range(2):
        apply(ours, version=number + 1, shares=shares(number, workers))
    before = [replica.clone() for replica in ours.replica]
    if fault == "raises":

        def fail(*_: object, **__: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(Downlink, "encode", fail)
    given, rate_factor = shares(2, workers), 3e39 if fault == "diverges" else 1.0
    with pytest.raises(DivergedError if fault == "diverges" else ZeroDivisionError):
        apply(ours, version=3, shares=given, rate_factor=rate_factor)
    assert ours.version == 2
    assert all(map(torch.equal, ours.parameters, before))
