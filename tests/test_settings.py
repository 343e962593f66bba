"""One declaration of each option, and what is made of it: commands, hand-over by gc-run, the job message."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gradwire.common.addresses import parse_address
from gradwire.common.configuration import REQUIRED, Option, UsageError, options_of, read
from gradwire.common.exits import Exit
from gradwire.common.spec import SpecError
from gradwire.deploy import cli as run
from gradwire.deploy.daemons import check_together, server_arguments, worker_arguments
from gradwire.optim.optimizer import parse_optimizer
from gradwire.proto.convert import decode, encode
from gradwire.proto.job import job_message, job_terms
from gradwire.proto.messages import JobDescription
from gradwire.proto.refusal import Refused
from gradwire.server import cli as server
from gradwire.server.job.modes import registry
from gradwire.settings import (
    COMMANDS,
    JobSettings,
    JobTerms,
    RunSettings,
    ServerSettings,
    WorkerSettings,
    parse_task,
)
from gradwire.worker import cli as worker

SPECS = {
    "preset": "diloco",
    "task": "spirals:task:points=64",
    "script": "python train.py",
    "optimizer": "adamw:weight_decay=0.1",
    "evaluate_every": "500steps",
}


def others(cls: type[Any]) -> dict[str, Any]:
    """A value for every option that is not its default."""

    def other(each: Option) -> Any:
        if each.kind is bool:
            return not each.default
        if each.choices:
            return next(choice for choice in each.choices if choice != each.default)
        if each.kind is str:
            return SPECS[each.name] if each.parse else f"other-{each.name}:key=1"
        return each.default + 1

    return {name: other(each) for name, each in options_of(cls).items()}


def as_told(cls: type[Any], argv: Sequence[str], **environ: str) -> Any:
    return read(cls, COMMANDS, argv=argv, environ=environ).settings


def test_the_job_message_holds_every_option_of_the_job() -> None:
    terms = JobTerms(id="1", work="local:correction=0.3", **others(JobSettings))
    message = decode(encode(job_message(terms)), JobDescription)
    assert message.settings.keys() == {*options_of(JobSettings), "work"}
    assert job_terms(message) == terms


def test_the_job_of_another_release_is_read_as_far_as_it_is_known() -> None:
    terms = job_terms(JobDescription(id="1", settings={"work": "gradients", "epochs": "2", "colour": "red"}))
    assert terms == JobTerms(id="1", work="gradients", epochs=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "expected a kind of work"),
        ({"work": "gradients", "epochs": "-1"}, "epochs: expected 0 to"),
        ({"work": "gradients", "seed": "x"}, "seed: expected a whole number"),
        ({"work": "gradients", "optimizer": "lion"}, "unknown optimizer 'lion'"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(Refused, match=words):
        job_terms(JobDescription(id="1", settings=settings))


def test_gc_run_hands_on_every_option_that_a_daemon_shares_with_it() -> None:
    theirs = others(RunSettings)
    del theirs["script"]  # is a switch of the server
    settings = RunSettings(**theirs)
    port = theirs.pop("http_port")  # is the server's; workers take free ones
    own = [name for name in theirs if name not in {*options_of(ServerSettings), *options_of(WorkerSettings)}]
    assert own == ["workers", "baseline", "json", "out"]
    told = as_told(ServerSettings, server_arguments(settings, 7, Path("p")), GC_EPOCHS="99", GC_STAY="off")
    assert (told.port, told.min_workers, told.output, told.stay) == (7, 5, "p", True)
    assert told.http_port == port
    to_worker = as_told(WorkerSettings, worker_arguments(settings, 7, 1), GC_ALLOW_TASK="os")
    assert (to_worker.server, to_worker.worker_id, to_worker.allow_task) == ("127.0.0.1:7", "worker-1", "")
    assert to_worker.http_port == 0
    for name, value in theirs.items():
        daemons = [each for each in (told, to_worker) if hasattr(each, name)]
        assert daemons or name in own
        assert all(getattr(each, name) == value for each in daemons), name


def test_an_option_means_the_same_in_every_command() -> None:
    """Those that two commands declare apart are the same name for two things, and are these."""
    apart: set[str] = set()
    for cls in COMMANDS:
        for other in COMMANDS:
            mine, theirs = options_of(cls), options_of(other)
            apart |= {name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]}
    assert apart == {"task", "script", "http_port", "compressor", "preset", "entropy"}


@pytest.mark.parametrize("cls", COMMANDS)
def test_every_option_is_described(cls: type[Any]) -> None:
    for name, each in options_of(cls).items():
        assert each.group, name
        assert each.help, name
        if each.default is not REQUIRED:
            assert each.convert(each.default) == each.default


MAINS: dict[str, Callable[[Sequence[str]], int]] = {
    "gc-server": server.main,
    "gc-worker": worker.main,
    "gc-run": run.main,
}


# By command, its arguments and words of the refusal.
REFUSED = {
    "gc-server": [
        ("--epocs 3", "did you mean '--epochs'?"),
        ("--mode stael", "did you mean 'stale'?"),
        ("--mode stale:bond=2", "did you mean 'bound'?"),
        ("--staleness 4", "unknown argument '--staleness'"),
        ("--task digit", "did you mean 'digits'?"),
        ("--optimizer adm", "did you mean 'adam'?"),
        ("--optimizer sgd:momentun=0.9", "did you mean 'momentum'?"),
        ("--schedule cosin", "did you mean 'cosine'?"),
        ("--aggregation medain", "did you mean 'median'?"),
        ("--downlink topkk", "did you mean 'topk'?"),
        ("--output /nowhere/at/all", "--output (flag): expected a file in a folder"),
        ("--host 300.1.1.1", "--host (flag): expected an IP address without a port, or a name"),
        ("--host 127.0.0.1:50051", "got '127.0.0.1:50051'"),
        ("--mode coded --downlink 4bit", "--mode coded has no updates"),
        ("--mode local:by=time --overlap both", "--overlap both: not with --mode local:by=time"),
        ("--mode local:steps=8,elastic=0.1", "correction: expected 0 with elastic=0.1, got 0.1"),
        ("--mode local:elastic=0.1,correction=0", "steps: expected a number with elastic=0.1"),
        (
            "--mode local:steps=8,elastic=0.1,correction=0,delayed=on",
            "delayed: expected off with elastic=0.1",
        ),
        (
            "--mode local:steps=8,elastic=0.1,correction=0,outer=adam",
            "outer: expected sgd at outer_rate=1 with elastic=0.1",
        ),
        (
            "--mode local:steps=8,elastic=0.1,correction=0 --overlap both",
            "--overlap both: not with --mode local:elastic=0.1",
        ),
        (
            "--mode local:steps=8,delayed=on --overlap both",
            "--overlap both: not with --mode local:delayed=on",
        ),
        ("--optimizer muon", "--optimizer muon: not with --mode sync: Muon steps whole matrices"),
        ("--optimizer muon --mode coded --downlink none", "--optimizer muon: not with --mode coded"),
        ("--mode local:outer=muon", "expected sgd, adam, adamw or adagrad, got muon"),
        ("--mode local:overlay=on", "correction: expected 0 with overlay=on, got 0.1"),
        ("--mode local:overlay=on,correction=0,delayed=on", "delayed: expected off with overlay=on"),
        (
            "--mode local:overlay=on,correction=0,steps=4,elastic=0.1",
            "elastic: expected 0 with overlay=on, got 0.1",
        ),
        (
            "--mode local:overlay=on,correction=0,outer=sgd/momentum=0.9",
            "outer: expected sgd at outer_rate=1 with overlay=on",
        ),
        (
            "--mode local:overlay=on,correction=0,outer_rate=1.0000001",
            "outer: expected sgd at outer_rate=1 with overlay=on, got sgd at outer_rate=1.0000001",
        ),
        (
            "--mode local:overlay=on,correction=0 --overlap both",
            "--overlap both: not with --mode local:overlay=on",
        ),
        ("--mode local:fragments=2", "correction: expected 0 with fragments=2, got 0.1"),
        (
            "--mode local:fragments=2,correction=0,steps=4,elastic=0.1",
            "elastic: expected 0 with fragments=2, got 0.1",
        ),
        (
            "--mode local:fragments=2,correction=0 --overlap both",
            "--overlap both: not with --mode local:fragments=2",
        ),
        (
            "--mode local:fragments=2,correction=0 --downlink none",
            "--downlink none: not with --mode local:fragments=2",
        ),
        ("--mode local:clip=1 --overlap both", "--overlap both: not with --mode local:clip"),
        (
            "--mode local:clip=1 --script",
            "--script: not with --mode local:clip=1: scripts take their own steps",
        ),
    ],
    "gc-run": [
        (
            "--mode coded:redundancy=2 --task digits:split=classes:2",
            "with split each worker has samples of its own, and with redundancy several workers compute",
        ),
        (
            "--mode sync:stragglers=1 --compressor none --task digits:split=dirichlet:0.3",
            "and with stragglers several workers compute the same ones; leave out split",
        ),
        ("--workres 3", "did you mean '--workers'?"),
        ("--mode coded --compressor 4bit", "exchanges gradients in fixed point"),
        (
            "--mode sync:stragglers=1 --compressor 4bit",
            "--compressor 4bit: --mode sync:stragglers=1 amplifies the errors of a lossy compressor",
        ),
        ("--mode coded:redundancy=4", "--workers 4 allows up to 3"),
        ("--mode sync:backup=4", "--workers 4: --mode sync:backup=4"),
    ],
    "gc-worker": [
        ("--server x --compressor 4bti", "did you mean '4bit'?"),
        ("--server x --compressor topk:ration=4", "did you mean 'ratio'?"),
        ("--server http://x", "--server (flag): expected host or host:port"),
        ("--server x --allow-task my-tasks", "expected module names"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "words"), [(command, *each) for command in REFUSED for each in REFUSED[command]]
)
@pytest.mark.parametrize("only_print", [False, True])
def test_print_config_refuses_what_the_start_refuses(
    capsys: pytest.CaptureFixture[str], command: str, arguments: str, words: str, only_print: bool
) -> None:
    argv = [*arguments.split(), *(["--print-config"] if only_print else [])]
    assert MAINS[command](argv) == Exit.USAGE
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""


def nothing(settings: RunSettings, interrupt: Any) -> None:
    pass


@pytest.mark.parametrize("mode", ["coded:redundancy=auto", "sync:stragglers=1"])
def test_print_config_shows_what_follows_from_the_mode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_prepare", nothing)  # takes seconds; the next test sees it at work
    environ = {**os.environ, "GC_SEED": "5"}
    assert run.main(["--mode", mode, "--print-config"], environ) == Exit.DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert "compressor = 'none' # because of --mode" in printed
    assert f"mode = '{mode}' # flag" in printed
    assert "seed = 5 # environment GC_SEED" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_cannot_be_imported_is_refused_by_print_config_of_gc_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.main(["--task", "no_such_module:task", "--print-config"]) == Exit.USAGE
    assert "there is no module 'no_such_module'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("no_such_module:task", "there is no module 'no_such_module'"),
        ("own_tasks:other", "has no 'other'"),
        ("own_tasks:make:widht=3", "did you mean 'width'?"),
        ("broken_tasks:make", "importing broken_tasks raised ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("only_print", [False, True])
def test_a_worker_refuses_its_own_task_before_it_looks_for_a_server(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    task: str,
    words: str,
    only_print: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in (
        ("own_tasks", "def make(width=3): raise OSError('it is loaded later')"),
        ("broken_tasks", "1 / 0"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    argv = ["--server", "127.0.0.1:1", "--http-port", "-1", "--connect-seconds", "0", "--task", task]
    assert worker.main([*argv, *(["--print-config"] if only_print else [])]) == Exit.TASK
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""
    assert worker.main([*argv[:-1], "own_tasks:make:width=4", "--print-config"]) == Exit.DONE


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", "127.1", "localhost", "gradwire-server-0.gradwire"])
def test_hosts_to_listen_on(host: str) -> None:
    assert as_told(ServerSettings, ["--host", host]).host == host


@pytest.mark.parametrize("command", MAINS)
def test_help_lists_every_option_in_groups(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        MAINS[command](["--help"])
    printed = capsys.readouterr().out
    (cls,) = [cls for cls, each in COMMANDS.items() if each == command]
    for each in options_of(cls).values():
        assert f"\n  {each.flag}" in printed
        assert f"\n{each.group}:\n" in printed
    assert ("stale:rate=full" in printed) == (command != "gc-worker")


@pytest.mark.parametrize("name", registry.MODES)
def test_a_mode_is_named_with_its_options(name: str) -> None:
    mode = registry.MODES[name]
    keys = [f"{key}={each.default_text}" for key, each in options_of(mode).items()]
    spec = ":".join(filter(None, [name, ",".join(keys)]))
    assert registry.parse(name) == registry.parse(spec) == mode()
    assert f"  {spec}" in registry.describe().splitlines()
    check_together(RunSettings(mode=name, compressor="none"))


def test_the_outer_optimizer_is_named_inside_of_a_mode() -> None:
    mode = registry.parse("local:outer=sgd/momentum=0.9/nesterov=on,outer_rate=0.7")
    found = mode.optimizer(ServerSettings(optimizer="adam"))
    assert found == (parse_optimizer("sgd:momentum=0.9,nesterov=on"), 0.7)
    with pytest.raises(SpecError, match="did you mean 'momentum'"):
        registry.parse("local:outer=sgd/momentim=0.9")


def test_inverse_rates_need_an_optimizer_that_notices() -> None:
    with pytest.raises(UsageError, match="is independent of their magnitude; use sgd"):
        check_together(RunSettings(mode="async:rate=inverse", optimizer="adam"))
    check_together(RunSettings(mode="async:rate=inverse", optimizer="sgd"))


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("host", "host:50051"),
        ("host:7", "host:7"),
        ("10.0.0.1", "10.0.0.1:50051"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("fe80::1%eth0", "[fe80::1%eth0]:50051"),
        ("[fe80::1%eth0]:7", "[fe80::1%eth0]:7"),
        ("2001:DB8::1", "[2001:DB8::1]:50051"),
        ("Host.Example.", "Host.Example.:50051"),
        ("dns:7", "dns:7"),
    ],
)
def test_addresses(given: str, address: str) -> None:
    assert parse_address(given) == address


@pytest.mark.parametrize(
    "text",
    [
        *("host:0", "host:65536", "host:x", "host:", ":7", "a b", "", "host:7/path", "host:\u0663"),
        *("[::1", "[host]:7", "::1:50051", "[::1]7", "a[::1]:7"),
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="expected host"):
        parse_address(text)


def test_an_address_with_a_scheme_is_refused_with_the_address_that_is_meant() -> None:
    with pytest.raises(ValueError, match=r"without http://, such as host:7, got 'http://host:7/'"):
        parse_address("http://host:7/")


@pytest.mark.parametrize("text", ["digit", ".digits:digits", "a-b:c", "os:", ":system", "a:b:c", "a..b:c"])
def test_what_is_no_task(text: str) -> None:
    with pytest.raises(SpecError, match="unknown task"):
        parse_task(text)
