"""Options: flag > environment > file > default, and messages that say what to correct."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from gradwire.common.configuration import REQUIRED, Effective, UsageError, option, read
from gradwire.settings import COMMANDS as GRADWIRE
from gradwire.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = option(REQUIRED, "name of something", group="one")
    port: int = option(1, "number of something", group="one", least=0, most=99, unit="things")
    rate: float = option(0.5, "fraction of 100 %", group="two")
    mode: Literal["a", "b"] = option("a", "mode", group="two")
    fast_path: bool = option(False, "switch", group="two")


@dataclass(frozen=True, kw_only=True)
class Other:
    x: int = option(1, "number", group="one")


COMMANDS: dict[type[Any], str] = {Config: "gc-test", Other: "gc-other"}


def get(*argv: str, environ: dict[str, str] | None = None) -> Effective[Config]:
    return read(Config, COMMANDS, argv=argv, environ=environ or {}, epilog="the end")


def test_each_source_beats_the_next(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[test]\nname = "file"\nport = 2\nrate = 3\nfast-path = true\n[other]\nx = 1\n')
    effective = get("--config", str(file), "--name", "flag", environ={"GC_NAME": "env", "GC_PORT": "7"})
    assert effective.settings == Config(name="flag", port=7, rate=3.0, mode="a", fast_path=True)
    assert effective.origins == {
        "name": "flag",
        "port": "environment GC_PORT",
        "rate": "file",
        "mode": "default",
        "fast_path": "file",
    }


def test_the_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[test]\nname = "file"\n')
    assert get(environ={"GC_CONFIG": str(file)}).settings.name == "file"


def test_a_switch_can_be_taken_back() -> None:
    assert get("--name", "x", "--no-fast-path", environ={"GC_FAST_PATH": "on"}).settings.fast_path is False
    assert get("--name", "x", environ={"GC_FAST_PATH": "1"}).settings.fast_path is True


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        ((), {}, "--name is required (or set GC_NAME"),
        (("--name", "x", "--port", "-1"), {}, "--port (flag): expected 0 to 99, got '-1'"),
        (
            ("--name", "x"),
            {"GC_PORT": "many"},
            "--port (environment GC_PORT): expected a whole number, got 'many'",
        ),
        (("--name", "x", "--port", "1.5"), {}, "--port (flag): expected a whole number"),
        (("--name", "x", "--rate", "nan"), {}, "--rate (flag): expected a finite number, got 'nan'"),
        (("--name", "x", "--rate", "inf"), {}, "--rate (flag): expected a finite number, got 'inf'"),
        (("--name", "x", "--mode", "c"), {}, "--mode (flag): expected one of a, b, got 'c'"),
        (("--name", "x"), {"GC_FAST_PATH": "maybe"}, "expected true or false, got 'maybe'"),
        (("--name", "x", "--colour", "red"), {}, "unknown argument '--colour'"),
        (("--name", "x", "--x=1"), {}, "unknown argument '--x=1'; it is an option of gc-other"),
        (("--nam", "x"), {}, "unknown argument '--nam' (did you mean '--name'?)"),
    ],
)
def test_what_is_wrong_is_said(argv: tuple[str, ...], environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        get(*argv, environ=environ)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = ", "not TOML"),
        ('test = "x"', "'test' must be a table"),
        ("[test]\nspeed = 1", "unknown key 'speed' in [test]; known keys: fast-path, mode, name, port, rate"),
        ("[test]\npord = 1", "unknown key 'pord' in [test] (did you mean 'port'?); known keys"),
        ("[tset]\nport = 1", "unknown table [tset] (did you mean 'test'?); known tables: [other], [test]"),
        ("[other]\ny = 1", "unknown key 'y' in [other]; known keys: x"),
        ("port = 1", "'port' is outside any table; put it below a line [test]"),
        ("[test]\nfast_pat = 1", "unknown key 'fast_pat' in [test] (did you mean 'fast-path'?)"),
        ("[test]\nport = true", "job.toml): expected a whole number, got True"),
        ("[test]\nport = 1.0", "job.toml): expected a whole number, got 1.0"),
        ("[test]\nname = [5]", "job.toml): expected text, got [5]"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    environ = {} if "name" in text else {"GC_NAME": "x"}
    with pytest.raises(UsageError) as caught:
        get("--config", str(file), environ=environ)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        get("--config", str(tmp_path / "none.toml"))


def test_a_misspelt_variable_is_refused_and_those_of_other_commands_are_not() -> None:
    with pytest.raises(UsageError, match=r"GC_PROT: no command has this .*did you mean 'GC_PORT'\?"):
        get("--name", "x", environ={"GC_PROT": "1"})
    with pytest.raises(UsageError, match=r"GC_FASTPATH: .*did you mean 'GC_FAST_PATH'"):
        get("--name", "x", environ={"GC_FASTPATH": "1"})
    assert get("--name", "x", environ={"GC_X": "7", "OTHER": "GC_"}).settings.port == 1


def test_variables_of_other_programs_are_passed_over_with_a_warning() -> None:
    names = "GC_INITIAL_HEAP_SIZE", "GC_KEYFILE", "GC_NPROCS", "GC_PROJECT_ID"
    effective = read(WorkerSettings, GRADWIRE, argv=["--server", "x"], environ=dict.fromkeys(names, "x"))
    assert effective.foreign == (
        "environment GC_INITIAL_HEAP_SIZE, GC_KEYFILE, GC_NPROCS, GC_PROJECT_ID: ignored, because no option "
        "of Gradwire has this name"
    )
    assert not read(WorkerSettings, GRADWIRE, argv=[], environ={"GC_SERVER": "x", "OTHER": "x"}).foreign
    for misspelt in ("GC_BATCHSIZE", "GC_LEARNING_RAT", "GC_TOKENFILE", "GC_SERVERS", "GC_WORKERID"):
        with pytest.raises(UsageError, match=f"{misspelt}: .*did you mean"):
            read(WorkerSettings, GRADWIRE, argv=[], environ={misspelt: "x"})


def test_variables_that_kubernetes_sets_for_a_service_are_passed_over() -> None:
    """The variables are those of services called gc and gc-server; the second also looks like the option
    --port."""
    environ = {
        "GC_SERVER_SERVICE_HOST": "10.0.0.1",
        "GC_SERVER_SERVICE_PORT": "50051",
        "GC_SERVER_SERVICE_PORT_GRPC": "50051",
        "GC_SERVER_PORT": "tcp://10.0.0.1:50051",
        "GC_SERVER_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "GC_SERVER_PORT_50051_TCP_PROTO": "tcp",
        "GC_SERVER_PORT_50051_TCP_PORT": "50051",
        "GC_SERVER_PORT_50051_TCP_ADDR": "10.0.0.1",
        "GC_PORT": "tcp://10.0.0.2:50051",
    }
    assert get("--name", "x", environ=environ).origins["port"] == "default"


def test_values_that_follow_from_others_say_so() -> None:
    effective = get("--name", "x").changed("because of --name", port=7)
    assert effective.settings.port == 7
    assert "port      = 7  # because of --name" in effective.describe()
    assert effective.chosen("name")
    assert not effective.chosen("rate")


def test_the_effective_configuration_can_be_printed() -> None:
    assert not get("--name", "x").print_config
    effective = get("--name", "x", "--print-config", environ={"GC_PORT": "9"})
    assert effective.print_config
    printed = effective.describe()
    assert "port      = 9  # environment GC_PORT" in printed
    assert "name      = 'x'  # flag" in printed


def test_help_shows_groups_units_and_bounds_and_survives_percent_signs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        get("--help")
    printed = capsys.readouterr().out
    assert "fraction of 100 % (default: 0.5)" in printed
    assert "number of something (things; 0 to 99; default: 1)" in " ".join(printed.split())
    assert "name of something (required)" in printed
    assert printed.index("\none:\n") < printed.index("\n  --port THINGS") < printed.index("\ntwo:\n")
    assert printed.endswith("the end\n")
    assert "GC_<OPTION>" in printed
