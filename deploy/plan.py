"""gc-plan: predict the seconds of a step for each way to run a job, and recommend one.

The job is described by a model's tensors, a link and a number of workers; no training is run. With --server
the job is a running one. gc-plan then takes its server's measurements, and prints the measured seconds of a
step beside the predicted ones. docs/how-to/planning.md lists the effects that predictions include.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.exits import Exit, command
from ..common.spec import SpecError
from ..compressors import parse_compressor
from ..optim.optimizer import parse_optimizer
from ..optim.steps import COUNT, memory_names
from ..planning import models
from ..planning.fusion import Reason
from ..planning.job import JobProfile, StepOptions, seamgs_reasons
from ..planning.memory import JobMemory, memory_of
from ..planning.predictions import WORTH, Prediction, faster_than, predict, rank, recommend
from ..settings import ServerSettings
from .arguments import access_files_of, add_access_files, at_least_one, command_parser, file_to_write
from .plan_losses import COMPRESSORS, FP32, Losses, compared_specs, losses_with
from .plan_models import model_tensors
from .plan_presets import ranked_presets

if TYPE_CHECKING:
    from .live import LiveJob

MULTIPLICATIONS = 5e12  # by a worker per second, without --computation: those of an older GPU
FORWARD = 1 / 3  # share of the forward pass in the computation
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit(?:/s)?")
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)?")
_SAMPLES = re.compile(r"(\d+(?:\.\d+)?)/s")


def bandwidth(text: str) -> float:
    """Parse bits per second, such as `100mbit`, and return bytes per second."""
    match = _BANDWIDTH.fullmatch(text.lower())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected bits per second such as 100mbit or 2.5gbit, got {text!r}")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8


def seconds(text: str) -> float:
    """Parse a time such as `0.3`, `20ms` or `150us` and return seconds."""
    match = _SECONDS.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected seconds such as 0.3, 20ms or 150us, got {text!r}")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3}.get(match[2], 1.0)


def computation(text: str) -> Callable[[int], float]:
    """Parse seconds per step, such as 300ms, or samples per second, such as 250/s; return a function from the
    number of samples of a step to its seconds."""
    match = _SAMPLES.fullmatch(text)
    if match is None:
        try:
            found = seconds(text)
        except argparse.ArgumentTypeError:
            expected = "expected seconds per step such as 0.3 or 300ms, or samples per second such as 250/s"
            raise argparse.ArgumentTypeError(f"{expected}, got {text!r}") from None
        return lambda samples: found
    pace = float(match[1])
    if not pace:
        raise argparse.ArgumentTypeError(f"expected more than 0 samples per second, got {text!r}")
    return lambda samples: samples / pace


def computation_of(model: str, samples: int) -> float:
    """Return the seconds of computation per step that are assumed without --computation.

    The model's multiplications count three times: once for the forward pass, twice for backward.

    Raises:
        SpecError: the model is unknown.
    """
    return _assumed_s(sum(tensor.multiplications for tensor in model_tensors(model)), samples)


def _assumed_s(multiplications: int, samples: int) -> float:
    return 3 * samples * multiplications / MULTIPLICATIONS


def parser() -> argparse.ArgumentParser:
    """Make gc-plan's parser of command-line arguments."""
    found = command_parser("gc-plan", __doc__)

    def option(flag: str, metavar: str, text: str, **more: Any) -> None:
        shown = " (default: %(default)s)" if isinstance(more.get("default"), int | str) else ""
        found.add_argument(flag, metavar=metavar, help=text + shown, **more)

    text = "server of a running job, whose measurements replace the options for model, computation, workers"
    option("--server", "HOST[:PORT]", f"{text} and link")
    add_access_files(found, os.environ)
    text = f"model: {', '.join(models.MODELS)}; NxSIZE for N tensors of SIZE elements; one's own as a"
    option("--model", "NAME", f"{text} .safetensors file, or as MODULE:FUNCTION that returns it")
    text = "bandwidth of each machine's link in each direction, such as 100mbit"
    option("--bandwidth", "RATE", text, type=bandwidth)
    text = "bandwidth of the server's link in each direction (default: that of --bandwidth)"
    option("--server-bandwidth", "RATE", text, type=bandwidth)
    text = "round trip between a worker and the server, such as 20ms"
    option("--rtt", "TIME", text, type=seconds, default="1ms")
    option("--workers", "N", "number of workers", type=at_least_one, default=4)
    text = "computation of a worker: seconds per step such as 300ms, or samples per second such as 250/s"
    assumed = f"(default: from the model, at {2 * MULTIPLICATIONS / 1e12:g} TFLOP/s)"
    option("--computation", "TIME", f"{text} {assumed}", type=computation)
    text = "samples per worker and step, unless --computation is given per step"
    option("--batch-size", "N", text, type=at_least_one, default=32)
    text = "number of cores that all processes share, if they run on one machine; the computation does not"
    option("--cores", "N", f"{text} use these cores (default: unlimited)", type=at_least_one)
    text = (
        "optimizer of the job, as gc-server's --optimizer, for what compressors were measured to lose with it"
    )
    option("--optimizer", "SPEC", f"{text} (default: {ServerSettings().optimizer})")
    text = f"(default: {' '.join(COMPRESSORS)})"
    option("--compressors", "SPEC", f"compressors to compare {text}", nargs="+")
    found.add_argument("--presets", action="store_true", help="also rank the presets")
    text = "file for all predictions and the timeline of the recommended step; - is standard output"
    option("--json", "FILE", text)
    return found


def profile_of(given: argparse.Namespace) -> JobProfile:
    """Return the job that the options describe, in the planner's terms.

    Raises:
        SpecError: if --model or --bandwidth is missing, or the model is unknown.
    """
    missing = [f"--{name}" for name in ("model", "bandwidth") if getattr(given, name) is None]
    if missing:
        raise SpecError(f"expected {' and '.join(missing)}, or --server of a running job")
    tensors = model_tensors(given.model)
    work = sum(tensor.multiplications for tensor in tensors)
    if given.computation is not None:
        total = given.computation(given.batch_size)
    else:
        total = _assumed_s(work, given.batch_size)  # a user's function has made the model once
    each = [total * tensor.multiplications / work for tensor in tensors]
    return JobProfile(
        shapes=[tensor.shape for tensor in tensors],
        forward_s=[FORWARD * seconds for seconds in each],
        backward_s=[(1 - FORWARD) * seconds for seconds in each],
        square_norms=[tensor.square_norm for tensor in tensors],
        worker_bandwidth=given.bandwidth,
        server_bandwidth=given.server_bandwidth or given.bandwidth,
        workers=given.workers,
        rtt_s=given.rtt,
        cores=given.cores,
    )


def live_job(server: str, files: Mapping[str, str]) -> LiveJob:
    """Ask a running job's server for its measurements, and return the job in the planner's terms.

    Raises:
        SpecError: if the server does not answer or refuses, or has too few measurements yet.
    """
    from ..common.addresses import parse_address
    from ..proto.refusal import Refused
    from .live import live_job_of
    from .status import asking, why_silent  # late: they import grpc

    try:
        target = parse_address(server)
    except ValueError as error:
        raise SpecError(f"--server: {error}") from None
    try:
        with asking(target, measured=True, files=files) as ask:
            ask()  # opens the connection, so that the next call takes one round trip
            began = time.perf_counter()
            status = ask()
            rtt_s = time.perf_counter() - began
    except Refused as refused:
        raise SpecError(f"--server {server}: {refused}") from None
    if status is None:
        raise SpecError(f"--server {server}: {why_silent(target, files).text}")
    found = live_job_of(status, workers=max(1, len(status.members)), rtt_s=rtt_s)
    if found is None:
        raise SpecError(
            f"--server {server}: it has too few measurements yet; ask again after 50 steps. A job that sends "
            "nothing during backward, as with --overlap off, local:clip= or scripts' local steps, never has "
            "them: use --model there"
        )
    return found


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run gc-plan with arguments `argv`, by default those of the process; return the exit code."""
    given = parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        if given.json not in (None, "-"):
            file_to_write(given.json)
        job = live_job(given.server, access_files_of(given)) if given.server is not None else None
        profile = profile_of(given) if job is None else job.profile
        given.model = given.model if job is None else job.name
        if "auto" in (given.compressors or ()):
            raise SpecError("--compressors auto: it chooses by measuring; name the compressors to compare")
        optimizer = parse_optimizer(given.optimizer or ServerSettings().optimizer)
        specs = compared_specs(given.compressors, optimizer)
        losses, ranked = losses_with(optimizer, specs), rank(profile, [each.compression() for each in specs])
    except (SpecError, argparse.ArgumentTypeError) as error:
        print(f"gc-plan: {error}", file=sys.stderr)
        return Exit.USAGE
    chosen = recommend([each for each in ranked if losses.little(each)] or ranked)
    reason, memory = reason_for(profile, chosen, ranked, losses), memory_for(profile, chosen, given.optimizer)
    presets = ranked_presets(profile) if given.presets else {}
    if given.json is not None:
        text = to_json(given.model, profile, ranked, chosen, reason, presets, losses, memory, given.optimizer)
        if given.json == "-":
            print(text, end="")
            return Exit.DONE
        from .report import write_atomically

        write_atomically(Path(given.json), text)
    from .plan_tables import show

    show(given.model, profile, ranked, chosen, presets, losses)
    if job is not None:
        print(job.comparison())
    print(reason, *(f"    {line}" for line in commands(profile, chosen.choice, given.optimizer)), sep="\n")
    if memory is not None:
        print(memory_line(memory))
    if presets:
        fastest, step = next(iter(presets.items()))
        print(f"Fastest preset: {step.step_s:.3g} s per step; docs/how-to/slow-link.md has measured losses.")
        print(f"    gc-server --min-workers {profile.workers} --preset {fastest}")
    print(seamgs_line(profile, chosen))
    return Exit.DONE


def commands(profile: JobProfile, choice: StepOptions, optimizer: str | None) -> list[str]:
    """Return the command lines that start the server and a worker with these options, but for defaults."""
    usual = StepOptions()
    server = ["gc-server", f"--min-workers {profile.workers}"]
    if optimizer is not None:
        server.append(f"--optimizer {optimizer}")
    for name in ("mode", "overlap", "fusion", "order"):
        value = getattr(choice, name)
        if value != getattr(usual, name):
            server.append(f"--{name} {value}")
    server.append(f"--compressor {choice.compressor}")  # for all workers, as bases need it
    return [" ".join(server), "gc-worker --server HOST"]


def changes(profile: JobProfile) -> dict[str, JobProfile]:
    """Return variants of the job, each with one resource doubled, by a phrase that names the change."""
    found = {
        "links twice as fast": dataclasses.replace(
            profile,
            server_bandwidth=2 * profile.server_bandwidth,
            worker_bandwidth=2 * profile.worker_bandwidth,
        ),
        "twice as fast computation": dataclasses.replace(
            profile,
            forward_s=[each / 2 for each in profile.forward_s],
            backward_s=[each / 2 for each in profile.backward_s],
        ),
        "half the round trip": dataclasses.replace(profile, rtt_s=profile.rtt_s / 2),
    }
    if profile.cores is not None:
        found["twice as many cores"] = dataclasses.replace(profile, cores=2 * profile.cores)
    return found


def why_not(faster: Prediction, losses: Losses) -> str:
    """Return why a faster way than the recommended one is not recommended, as a sentence."""
    name, mode = faster.choice.compressor.name, faster.choice.mode
    way = f"{name}, {mode} ({faster.step_s:.3g} s)"
    if faster.choice.without_server:
        return (
            f"{way} is faster, {losses.text(faster)}, and needs no server; its ranks cannot join or leave. "
        )
    if not faster.synchronous:
        return f"{way} is faster, but {mode} changes how a sample is learned from. "
    if losses.little(faster):
        return f"{way} is within {WORTH:.0%}, but sends less of a gradient or needs more options. "
    optimizer = "Adam" if losses.with_adam else "SGD"
    return f"{way} is faster, but with {optimizer} {name} has {losses.text(faster)}. "


def reason_for(profile: JobProfile, chosen: Prediction, ranked: Sequence[Prediction], losses: Losses) -> str:
    """Return the recommendation as text: its time, why a faster way is not recommended, its slowest resource,
    and the most useful improvement."""
    choice, limit = chosen.choice, chosen.bottleneck
    plain = next((each.step_s for each in ranked if each.choice.compressor.name == FP32), None)
    beside = f", {plain / chosen.step_s:.2g} times as fast as DDP" if plain else ""
    took = f"{chosen.busy_s[limit]:.3g} s of it"
    found = f"Recommended: {choice.compressor}, {choice.mode}: {chosen.step_s:.3g} s per step{beside}. "
    what = {
        "computing": "Computation",
        "way up": "The upload to the server",
        "way down": "The download from the server",
        "server": "Summing and stepping at the server",
        "processors": "Processor time beside the computation",
    }[limit]
    told = [each for each in ranked if not each.choice.without_server or losses.little(each)]
    found += "".join(why_not(each, losses) for each in faster_than(chosen, told))
    found += f"{what} takes longest, {took}; "
    times = {name: predict(other, choice).step_s for name, other in changes(profile).items()}
    best = min(times, key=times.__getitem__)
    return found + f"{best} would make it {times[best]:.3g} s."


def memory_for(profile: JobProfile, chosen: Prediction, optimizer: str | None) -> JobMemory | None:
    """Return the memory of the recommended way; None where it is not known."""
    choice = chosen.choice
    if chosen.timeline is None:  # no step that passes part by part through a server
        return None
    states = 0 if optimizer is None else len(memory_names(parse_optimizer(optimizer)) - {COUNT})
    wrapping = parse_compressor(choice.compressor.name).wrapping
    return memory_of(
        profile.shapes,
        profile.workers,
        choice.compressor,
        feedback=wrapping is not None and wrapping.feedback,
        momentum=wrapping is not None and wrapping.momentum > 0,
        overlap=choice.overlap,
        redundancy=choice.redundancy,
        states=states,
    )


def memory_line(memory: JobMemory) -> str:
    """Return a line with the memory at a worker and at the server."""
    worker, server = (each / 1e9 for each in (memory.worker_bytes, memory.server_bytes))
    return (
        f"Memory beside programs and activations: {worker:.3g} GB at a worker, {server:.3g} GB at the server "
        "(docs/reference/memory.md)."
    )


def seamgs_line(profile: JobProfile, chosen: Prediction) -> str:
    """Return a line with the number of neighbouring tensors that `--fusion seamgs` would leave apart, and
    why, with the recommended compressor."""
    found = seamgs_reasons(profile, chosen.choice)
    counts = [f"{found.count(reason)} by {reason}" for reason in Reason if reason in found]
    apart = len(found) - found.count(None)
    why = f": {', '.join(counts)}" if counts else ""
    return f"--fusion seamgs would not merge {apart} of {len(found)} neighbours{why}."


def to_json(
    model: str,
    profile: JobProfile,
    ranked: Sequence[Prediction],
    chosen: Prediction,
    reason: str,
    presets: Mapping[str, Prediction],
    losses: Losses,
    memory: JobMemory | None,
    optimizer: str | None,
) -> str:
    """Return a JSON object with the job, all predictions, and the recommended one with its timeline. `model`
    names the model or, for a running job, its task."""
    known: dict[str, Any] = {
        field.name: getattr(profile, field.name)
        for field in dataclasses.fields(profile)
        if field.name not in ("shapes", "forward_s", "backward_s", "square_norms", "costs")
    }
    timeline = chosen.timeline.spans if chosen.timeline else ()
    content = {
        "model": model,
        "parameters": sum(profile.elements),
        "computation_s": profile.computation_s,
        **known,
        "costs": dataclasses.asdict(profile.costs),
        "losses": {"with": "adam" if losses.with_adam else "sgd", "measured": losses.measured},
        "predictions": [to_json_dict(each) for each in ranked],
        "recommended": {
            **to_json_dict(chosen),
            "reason": reason,
            "memory": None if memory is None else dataclasses.asdict(memory),
            "commands": commands(profile, chosen.choice, optimizer),
            "spans": [dataclasses.asdict(span) for span in timeline],
            # By tensor but the last, in forward order: why it is not merged with the next one; null if it is.
            "seamgs": seamgs_reasons(profile, chosen.choice),
        },
    }
    if presets:
        content["presets"] = [{"preset": name, **to_json_dict(each)} for name, each in presets.items()]
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def to_json_dict(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction's fields and options as a JSON object, without its timeline."""
    fields = dataclasses.fields(prediction)
    values = {field.name: getattr(prediction, field.name) for field in fields if field.name != "timeline"}
    values |= {"busy_s": dict(prediction.busy_s), "limit": prediction.bottleneck}
    choice = values.pop("choice")
    return dataclasses.asdict(choice) | {"compressor": choice.compressor.name} | values


if __name__ == "__main__":
    sys.exit(main())
