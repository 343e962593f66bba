"""Options of the mode `local`: rounds (`rounds`) of a number of local steps, `local:steps=8`, or adaptive.

Adaptive (`local:steps=adaptive,first=4,most=16`), for round s:

    H_s = ceil(sqrt((η_0 / η_s) · (F_s / F_0)) · H_0), at least 1 and at most H_max

F is the training loss, η_0 the base learning rate and η_s that of the schedule when the round begins. So H
falls when the loss falls, and rises when the rate falls: workers drift apart by about H times the rate.
Source: the multi-step paper, formula (1), with H_0 outside the root as in the work that it cites. Under the
root, as printed, H would be the root of H_0 at s = 0. The paper's text says that H falls with the rate; this
file follows its formula.

Algorithm 1 of the paper steps w before its `if` and once more in `else`; here a local step happens once. It
prints update and correction with plus signs, which ascend and repel: both are subtracted here. It aggregates
the last gradient of a round only, which would lose the other H - 1 steps: here the accumulated change is.

With `by=time`, an addition of this project, H hides the exchange: the steps take as long as the exchange
does.

    H = ceil(exchange / step), at least 1 and at most H_max

Both times are running means over rounds, in which each round has half the weight of the next one. The time of
a step is the time that the slowest member of a round reports for its steps, divided by their number. The
exchange is the rest of the round, from the assignment of work to the last push. The paper's text says that H
uses both times (§1, §2.3), and its formula does not. With `by=both`, H is the smaller of the two: the loss
limits how far workers may drift apart, and the times tell how long a round has to be to hide the exchange.

Three choices of formula (1) are this project's. H_0 and H_max have the values 4 and 16. The first round has
H_0 steps even if a warm-up changes its rate. The loss at the start of a round is unknown before workers have
begun it. So F_s is the loss at the start of the last closed round: the mean over the first local step of each
member.

With `--overlap both` the server steps parts early, and the exchange runs beside the last step and the next
first forward pass. Its time is then unknown, so `by` has to be `loss`.

With `elastic=α` a round ends with elastic averaging (`worker/training/elastic`), and the server adds the sum
of the workers' differences to the center: each push has the weight 1 instead of its share of the samples.

With `overlay=on` a worker begins each round at the global model less its own residual over the number of
workers (`worker/training/overlay`). That is where the model would be if all of the worker's changes had been
sent. The server takes no part in it.

With `fragments=F` a round exchanges the change of one of F parts of the model, in turn
(`worker/training/fragments`). The server steps the tensors whose change has come, and takes no other part in
it.

With `delayed=on` workers are told the samples of the next round, and begin its steps early
(`worker/training/delayed`). So its H has to be known by then, and is computed one round earlier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from ....common.configuration import UsageError, option
from ....optim.optimizer import parse_optimizer
from ....optim.steps import Muon, OptimizerOptions, Sgd
from ....settings import ServerSettings
from .options import ModeOptions, needs_mean, needs_workers, steps_by_coordinate

if TYPE_CHECKING:
    from ..state import JobState
    from .mode import Mode

MOST_STEPS = 10_000  # limit of local steps in a round


def _check_steps(name: str, steps: int) -> None:
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"{name}: expected 1 to {MOST_STEPS} steps, got {steps}")


def _parse_steps(text: str) -> None:
    if text != "adaptive":
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"expected a whole number, or adaptive, got {text!r}")
        _check_steps("local steps", int(text))


def _parse_outer(text: str) -> OptimizerOptions:
    """Parse an optimizer within a spec, where slashes stand for the colon and the commas.

    Raises:
        ValueError: the optimizer is unknown, or steps whole matrices, which the server has in parts only.
    """
    found = parse_optimizer(text.replace("/", ":", 1).replace("/", ","))
    if isinstance(found, Muon):
        raise ValueError("expected sgd, adam, adamw or adagrad, got muon: it steps whole matrices; use sgd")
    return found


def _text(value: object) -> str:
    """Return the value of an option as a spec writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


_PLAIN = "sgd at outer_rate=1"
_EXCLUDED = (  # an option that is on, the value that another one must have then, and the reason
    ("delayed", "by", "loss", "steps computed meanwhile hide the exchange; set a number of steps instead"),
    ("elastic", "steps", "a number", ""),
    ("elastic", "correction", "0", "the elastic term already pulls"),
    ("elastic", "delayed", "off", ""),
    ("elastic", "outer", _PLAIN, "the center moves by the sum of the differences itself"),
    ("overlay", "correction", "0", "it would pull the applied residual back"),
    ("overlay", "elastic", "0", ""),
    ("overlay", "delayed", "off", ""),
    ("overlay", "outer", _PLAIN, "workers can only foresee the effect of their residuals on a plain mean"),
    ("fragments", "correction", "0", "it would pull back the changes that workers carry between rounds"),
    ("fragments", "elastic", "0", "it would pull back the changes that workers carry between rounds"),
)
_REFUSED = (  # an option that is on, an option of the server that is refused then, and the reason
    ("delayed", "--overlap both", "the exchange already runs beside the next round; leave one of them out"),
    ("elastic", "--overlap both", "changes leave after the last step; use --overlap backward"),
    ("elastic", "--clip-norm", "the center moves by a sum, which must not be clipped; leave one of them out"),
    ("elastic", "--script", "scripts keep no parameters of their own; leave one of them out"),
    ("fragments", "--overlap both", "changes leave after the last step; use --overlap backward"),
    ("fragments", "--downlink", "it would send the whole model in each round; use auto"),
    ("overlay", "--overlap both", "it needs all of the model at once; use --overlap backward"),
    ("clip", "--overlap both", "it needs all of the model at once; use --overlap backward"),
    ("clip", "--script", "scripts take their own steps; call torch.nn.utils.clip_grad_norm_ in them"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions(ModeOptions):
    """Rounds of several local steps each, whose changes are averaged."""

    steps: str = option("adaptive", "local steps of a round, a number or adaptive", parse=_parse_steps)
    first: int = option(4, "adaptive steps of the first round", least=1)
    most: int = option(16, "limit of adaptive steps", least=1)
    by: Literal["loss", "time", "both"] = option(
        "loss",
        "quantity that sets adaptive steps: training loss, exchange time, or the smaller result of both",
    )
    correction: float = option(
        0.1, "fraction of the way back to the global model that each step takes", least=0, most=1
    )
    outer: str = option(
        "sgd",
        "optimizer that is applied to the mean change, such as sgd/momentum=0.9/nesterov=on",
        parse=_parse_outer,
    )
    outer_rate: float = option(1.0, "learning rate of the outer optimizer", least=0)
    delayed: bool = option(
        False, "start of the next round's steps while the changes of this one are exchanged"
    )
    elastic: float = option(
        0.0,
        "elastic averaging: share of the way by which worker and center approach each other after a round",
        least=0,
        most=1,
    )
    overlay: bool = option(False, "start of each round with the worker's share of its own residual applied")
    clip: float = option(
        0.0,
        "largest Euclidean norm of the gradient of a local step of a task; 0 for no limit",
        least=0,
    )
    fragments: int = option(
        1, "fragments of the model, of which each round exchanges one; 1 for the whole model", least=1
    )

    def __post_init__(self) -> None:
        _check_steps("first", self.first)
        _check_steps("most", self.most)
        if self.first > self.most:
            raise ValueError(f"first: expected at most `most`, which is {self.most}, got {self.first}")
        if self.by != "loss" and self.steps != "adaptive":
            raise ValueError(f"by: expected steps=adaptive with {self.by}, got steps={self.steps}")
        for name, other, expected, why in _EXCLUDED:
            found = self._found(other)
            if self._is_on(name) and found != expected:
                with_it = f"{name}={self._found(name)}"
                reason = f": {why}" if why else ""
                remedy = f"; add {other}={expected}" if expected in ("0", "off") else ""
                raise ValueError(f"{other}: expected {expected} with {with_it}, got {found}{reason}{remedy}")

    def _is_on(self, name: str) -> bool:
        """Return True if an option has another value than its default."""
        defaults = {each.name: each.default for each in fields(self)}
        return bool(getattr(self, name) != defaults[name])

    def _found(self, name: str) -> str:
        """Return the value of an option as `_EXCLUDED` writes it."""
        value = getattr(self, name)
        if name == "steps" and value != "adaptive":
            return "a number"
        if name == "outer":
            plain = _parse_outer(self.outer) == Sgd()
            return f"{'sgd' if plain else self.outer} at outer_rate={_text(self.outer_rate)}"
        return _text(value)

    def create(self, state: JobState) -> Mode:
        from .local_rounds import LocalRounds

        return LocalRounds(
            state,
            in_parts=self.steps_parts(state.rules),
            next_steps=self.next_steps,
            begins_early=self.delayed,
            elastic=self.elastic > 0,
        )

    @property
    def workers_step(self) -> bool:
        return True

    @property
    def work(self) -> str:
        names = "correction", "delayed", "elastic", "overlay", "clip", "fragments"
        always = names[:2]
        told = [name for name in names if name in always or self._is_on(name)]
        return "local:" + ",".join(f"{name}={_text(getattr(self, name))}" for name in told)

    def next_steps(self, loss_ratio: float, rate_ratio: float, time_ratio: float = math.nan) -> int:
        """Return the number of local steps in the next round.

        The formulas at the head of this file define it (H_s), limited to 1 to `most`; `first` if the ratios
        are unknown.

        Args:
            loss_ratio: loss at the start of the last closed round, divided by that of the first round; NaN
                before the first.
            rate_ratio: base learning rate, divided by the present one; infinite where the present one is 0.
            time_ratio: seconds of an exchange, divided by those of a step; NaN if unknown.
        """
        if self.steps != "adaptive":
            return int(self.steps)
        if self.by == "loss":
            return self._by_loss(loss_ratio, rate_ratio)
        if self.by == "time":
            return self._by_time(time_ratio)
        return min(self._by_loss(loss_ratio, rate_ratio), self._by_time(time_ratio))

    def _by_time(self, ratio: float) -> int:
        if not ratio >= 0:
            return self.first
        # A rounding error may raise the quotient a little above a whole number.
        return max(1, min(self.most, math.ceil(min(ratio, MOST_STEPS) * (1 - 1e-9))))

    def _by_loss(self, loss_ratio: float, rate_ratio: float) -> int:
        ratio = loss_ratio * rate_ratio
        if not ratio >= 0:  # NaN, or a loss below zero, from which no number of steps follows
            return self.first
        wanted = math.sqrt(ratio) * self.first
        # Rounding errors may raise the product a little above a whole number.
        return max(1, min(self.most, math.ceil(min(wanted, MOST_STEPS) * (1 - 1e-12))))

    def check(self, settings: ServerSettings) -> None:
        if self.by != "loss" and self.steps_parts(settings):
            raise UsageError(
                f"--overlap both: not with --mode local:by={self.by}: the time of an exchange beside "
                "computation is not known; use by=loss, a number of steps, or --overlap backward"
            )
        if self._is_on("elastic") or self._is_on("overlay") or self._is_on("fragments"):
            needs_mean(settings)
        given = {
            "--overlap both": settings.overlap == "both",
            "--clip-norm": bool(settings.clip_norm),
            "--script": settings.script,
            "--downlink": settings.downlink != "auto",
        }
        for name, option_, why in _REFUSED:
            if self._is_on(name) and given[option_]:
                value = f" {settings.downlink}" if option_ == "--downlink" else ""
                raise UsageError(f"{option_}{value}: not with --mode local:{name}={self._found(name)}: {why}")
        needs_workers(settings, 1)

    def steps_parts(self, settings: ServerSettings) -> bool:
        return not self.delayed and not self.elastic and steps_by_coordinate(settings)

    def optimizer(self, settings: ServerSettings) -> tuple[OptimizerOptions, float]:
        return _parse_outer(self.outer), self.outer_rate
