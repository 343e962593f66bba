"""Schedules and optimizers, from what an operator types."""

import math

import pytest

from gradwire.common.spec import SpecError
from gradwire.optim.optimizer import parse_optimizer
from gradwire.optim.steps import Adagrad, Adam, AdamW, Sgd
from gradwire.server.job.schedule import Passed, parse_schedule


@pytest.mark.parametrize(
    ("text", "epoch", "factor"),
    [
        ("constant", 17.3, 1.0),
        ("cosine", 0.0, 1.0),
        ("cosine", 15.0, 0.5),
        ("cosine", 30.0, 0.0),
        ("step", 9.99, 1.0),
        ("step", 10.0, 0.1),
        ("step:every=5,gamma=0.5", 12.0, 0.25),
        ("exponential", 2.5, 0.94**2),
        ("constant:warmup=4", 1.0, 0.25),
        ("constant:warmup=4", 4.0, 1.0),
        ("constant:warmup=4", 10.0, 1.0),
        ("exponential:gamma=0.5,warmup=2", 1.0, 0.25),
        ("constant:warmup=400steps", 1.0, 0.25),
        ("step:every=1000steps", 9.99, 1.0),
        ("step:every=1000steps", 10.0, 0.1),
        ("step:every=1steps,minimum=0.2", 29.0, 0.2),
        ("cosine:minimum=0.1", 30.0, 0.1),
        ("cosine:minimum=0.1", 15.0, 0.55),
        ("cosine:warmup=10", 10.0, 1.0),  # it begins where the warm-up ends
        ("cosine:warmup=10", 20.0, 0.5),
        ("cosine:warmup=10", 5.0, 0.5),
        ("cosine:warmup=1000steps", 20.0, 0.5),
        ("cosine:warmup=10,minimum=0.5", 30.0, 0.5),
        ("cosine:warmup=40", 20.0, 0.5),  # longer than the job
        ("constant:warmup=10%", 1.5, 0.5),
        ("constant:warmup=10%", 3.0, 1.0),
        ("cosine:warmup=10%", 0.0, 0.0),
        ("cosine:warmup=10%", 16.5, 0.5),
        ("step:every=50%", 14.9, 1.0),
        ("step:every=50%", 15.1, 0.1),
    ],
)
def test_factors(text: str, epoch: float, factor: float) -> None:
    passed = Passed(epochs=epoch, steps=100 * epoch, of_job=epoch / 30)
    assert math.isclose(parse_schedule(text).factor(passed), factor, abs_tol=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("linear", "known schedules: constant, cosine, exponential, step"),
        ("cosine:gamma=1", "unknown key 'gamma'; known keys: minimum, warmup"),
        ("step:every=0", "every: expected at least 1, got 0"),
        ("step:gamma=2", "gamma: expected above 0 and at most 1, got 2"),
        ("constant:warmup=-1", "warmup: expected a length such as 2epochs, 200steps, 10%, got '-1'"),
        ("constant:warmup=nan", "warmup: expected a length such as 2epochs, 200steps, 10%, got 'nan'"),
        ("constant:warmup=5s", "warmup: expected a length such as 2epochs, 200steps, 10%, got '5s'"),
        ("cosine:minimum=2", "minimum: expected 0 to 1, a fraction of the base rate, got 2"),
    ],
)
def test_bad_schedules(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_schedule(text)


def test_good_optimizers() -> None:
    assert parse_optimizer("sgd") == Sgd()
    assert parse_optimizer("sgd:momentum=0.9,weight_decay=1e-4,nesterov=on") == Sgd(
        momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    assert parse_optimizer("adam:beta1=0.5") == Adam(beta1=0.5)
    assert parse_optimizer("adamw") == AdamW(weight_decay=0.01)
    assert parse_optimizer("adagrad:initial_accumulator_value=0.1") == Adagrad(initial_accumulator_value=0.1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lion", "known optimizers: adagrad, adam, adamw, muon, sgd"),
        ("sgd:beta1=0.9", "unknown key 'beta1'; known keys: momentum, nesterov, weight_decay"),
        ("sgd:momentum=1", "momentum: expected at least 0 and below 1, got 1"),
        ("sgd:nesterov=on", "nesterov: expected a momentum above 0"),
        ("adam:weight_decay=-1", "weight_decay: expected a finite number of at least 0"),
        ("adagrad:eps=-1", "eps: expected a finite number of at least 0, got -1"),
        ("sgd:momentum", "expected key=value after the colon, got 'momentum'"),
    ],
)
def test_bad_optimizers(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_optimizer(text)
