"""The lines by which a script's user sees our exceptions."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import gradwire
from gradwire.common.one_line import in_one_line, show_in_one_line
from gradwire.worker.script.api import ERRORS


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """Raised from a frame of Python's library, as errors of hooks are from torch's."""
    error.__cause__ = cause
    future = Future[None]()
    future.set_exception(error)
    try:
        future.result()
    except Exception as found:
        return found
    raise AssertionError("no error")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook of a script, before which there was one that notes the types it sees."""
    seen: list[type[BaseException]] = []

    def before(kind: type[BaseException], error: BaseException, trace: object) -> None:
        seen.append(kind)

    monkeypatch.setattr(sys, "excepthook", before)
    show_in_one_line(*ERRORS)
    show_in_one_line(*ERRORS)  # a second `connect` changes nothing

    def shown(error: Exception) -> list[type[BaseException]]:
        sys.excepthook(type(error), error, error.__traceback__)
        return seen

    return shown


def test_our_exceptions_are_one_line_with_the_scripts_place(
    hook: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    error = raised(gradwire.ScriptError("do this"))
    error.add_note("or that")
    assert hook(error) == []
    assert capsys.readouterr().err == (
        f"gradwire.ScriptError: do this ({Path(__file__).name}, line 24)\nor that\n"
    )
    rendered: Any = error
    assert rendered._render_traceback_() == [in_one_line(error)]  # IPython calls it


def test_other_exceptions_and_causes_in_other_code_are_shown_as_before(hook: Any) -> None:
    assert hook(raised(ValueError("no"))) == [ValueError]
    assert hook(raised(gradwire.ModelError("no"), cause=KeyError("own"))) == [ValueError, gradwire.ModelError]


def test_all_of_them_can_be_caught_by_their_names() -> None:
    assert {getattr(gradwire, kind.__name__) for kind in ERRORS} == {*ERRORS}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("connect('127.0.0.1:1', connect_seconds=0)", "UnreachableError: cannot reach 127.0.0.1:1 after 0 s"),
        ("ddp.state('4bitt')", "SpecError: unknown compressor '4bitt' (did you mean '4bit'?)"),
        (
            "ddp.state('topk:ration=9')",
            "SpecError: compressor 'topk': unknown key 'ration' (did you",
        ),
        (
            "ddp.state('4bit:delay=2')",
            "SpecError: compressor '4bit:delay=2': DDP exchanges gradients",
        ),
        ("ddp.state('topk', exchange='owners')", "SpecError: compressor 'topk': exchange: expected auto or"),
    ],
)
def test_a_script_ends_with_one_line(tmp_path: Path, call: str, words: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"import gradwire\ngradwire.{call}\n")
    ended = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"gradwire.{words}")
    assert last.endswith(" (train.py, line 2)")
