"""Options: flag > environment > file > default, and messages that say what to correct."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from gradwire.options import Effective, UsageError, at_least, option, resolve


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = option(help="required")
    port: int = option(1, "a number", check=at_least(0))
    rate: float = option(0.5, "a fraction of 100 %")
    mode: str = option("a", choices=("a", "b"))
    fast_path: bool = option(False, "a switch")


def get(*argv: str, environ: dict[str, str] | None = None) -> Effective[Config]:
    return resolve(Config, prog="gc-test", description="d", argv=argv, environ=environ or {}, version="1")


def test_each_source_beats_the_next(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[test]\nname = "file"\nport = 2\nrate = 3\nfast-path = true\n[other]\nx = 1\n')
    effective = get("--config", str(file), "--name", "flag", environ={"GC_NAME": "env", "GC_PORT": "7"})
    assert effective.config == Config(name="flag", port=7, rate=3.0, mode="a", fast_path=True)
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
    assert get(environ={"GC_CONFIG": str(file)}).config.name == "file"


def test_a_switch_can_be_taken_back() -> None:
    assert get("--name", "x", "--no-fast-path", environ={"GC_FAST_PATH": "on"}).config.fast_path is False
    assert get("--name", "x", environ={"GC_FAST_PATH": "1"}).config.fast_path is True


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        ((), {}, "--name is required (or set GC_NAME"),
        (("--name", "x", "--port", "-1"), {}, "--port (flag): expected at least 0, got '-1'"),
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
        (("--name", "x", "--colour", "red"), {}, "unrecognized arguments: --colour red"),
        (("--nam", "x"), {}, "unrecognized arguments: --nam x"),
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
        ("[test]\nspeed = 1", "unknown key 'speed' in [test]; known: fast_path, mode, name, port, rate"),
        ("[test]\nport = true", "--port (file): expected a number, got True"),
        ("[test]\nname = [5]", "--name (file): expected text, got [5]"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    environ = {} if "name" in text else {"GC_NAME": "x"}
    with pytest.raises(UsageError) as caught:
        get("--config", str(file), environ=environ)
    assert words in str(caught.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        get("--config", str(tmp_path / "none.toml"))


def test_the_effective_configuration_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        get("--name", "x", "--print-config", environ={"GC_PORT": "9"})
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "port      = 9  # environment GC_PORT" in printed
    assert "name      = 'x'  # flag" in printed


def test_help_shows_defaults_and_survives_percent_signs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        get("--help")
    printed = capsys.readouterr().out
    assert "a fraction of 100 % (default: 0.5)" in printed
    assert "GC_<OPTION>" in printed
