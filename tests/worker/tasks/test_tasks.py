"""Loading a task from its spec, and every way in which that can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from gradwire.common import plugins
from gradwire.common.configuration import UsageError
from gradwire.settings import BUILT_IN_TASKS
from gradwire.worker.tasks import TaskError, TaskSpecError, check_task, load, load_allowed

ROOT = Path(__file__).resolve().parents[3]

MODULE = """
from __future__ import annotations
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from gradwire.worker.tasks import Task

if TYPE_CHECKING:
    from somewhere import Unimportable

def make(
    width: int = 3, rate: float = 0.5, deep: bool = False,
    kind: Literal["a", "b"] = "a", limit: int | None = None,
) -> Task:
    return Task(
        name=repr((width, rate, deep, kind, limit)), train_samples=4,
        model=lambda: None, batch=lambda i: i, loss=lambda m, b: 0, evaluate=lambda m: {},
    )

def unresolved(size: int, other: Unimportable = None) -> Task:
    return make(int(size))

def anything(**options: str) -> Task:
    return make(len(options))

def fails() -> Task:
    return {}["missing"]

def empty() -> Task:
    return Task(name="empty", train_samples=0, model=make, batch=make, loss=make, evaluate=make)

def not_made() -> Task:
    return Task(name="odd", train_samples=1, model=object(), batch=make, loss=make, evaluate=make)

def other():
    return 7

constant = 7

def reads(data: Path) -> Task:
    return make()

def leaves() -> Task:
    raise SystemExit(0)

def odd(size: 1 / 0 = 3, other: make.missing = 4) -> Task:
    return make(int(size))
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with modules in it that nothing else knows."""
    (tmp_path / "own_tasks.py").write_text(MODULE)
    (tmp_path / "broken_tasks.py").write_text("import a_module_that_is_not_there")
    (tmp_path / "wrong_tasks.py").write_text("this is no Python")
    (tmp_path / "script_tasks.py").write_text("import sys\nsys.exit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own_tasks", "broken_tasks", "wrong_tasks", "script_tasks"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("own_tasks:make", "(3, 0.5, False, 'a', None)"),
        ("own_tasks:make:width=8,rate=1e-3,deep=on,kind=b,limit=2", "(8, 0.001, True, 'b', 2)"),
        ("own_tasks:unresolved:size=5", "(5, 0.5, False, 'a', None)"),
        ("own_tasks:anything:a=1,b=2", "(2, 0.5, False, 'a', None)"),
        ("own_tasks:odd:size=5", "(5, 0.5, False, 'a', None)"),
    ],
)
def test_options_reach_the_function_as_it_annotates_them(spec: str, name: str) -> None:
    assert load(spec).name == name


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "digit",
            [
                "unknown task 'digit'",
                "known tasks: characters, cifar10, cifar100, digits, hyperspectral, mnist",
                "module:function",
            ],
        ),
        ("digit:model=cnn", ["unknown task", "did you mean 'digits'?"]),
        ("", ["task ''", "name[:key=value,...]"]),
        (":make", ["unknown task ':make'"]),
        ("..task:make", ["unknown task"]),
        ("nowhere:make", ["no module 'nowhere'", "installed packages", "PYTHONPATH"]),
        ("own_tasks.inner:make", ["no module 'own_tasks.inner'"]),
        ("own_tasks:missing", ["own_tasks.py has no 'missing'"]),
        ("own_tasks:constant", ["constant must be a function, but is a int"]),
        ("builtins:nothing", ["builtins has no 'nothing'"]),
        ("builtins:dict", ["its parameters cannot be read", "name a function that returns a Task"]),
        ("own_tasks:make:depth=2", ["unknown option 'depth'", "width", "rate", "deep"]),
        ("own_tasks:make:width=wide", ["option width", "expected int, got 'wide'"]),
        ("own_tasks:make:deep=1", ["option deep", "expected on or off, got '1'"]),
        ("own_tasks:make:kind=c", ["option kind", "one of a, b", "'c'"]),
        ("own_tasks:make:width=1,width=2", ["key 'width' is given twice"]),
        ("own_tasks:unresolved", ["option 'size' is required"]),
        ("digits:model=rnn", ["option model", "mlp, cnn", "'rnn'"]),
        ("digits:size=3", ["unknown option 'size'", "known options: model, split"]),
    ],
)
def test_a_spec_to_correct_says_what_would_do(spec: str, words: list[str]) -> None:
    with pytest.raises(TaskSpecError) as caught:
        load(spec)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "own_tasks:fails",
            ["'own_tasks:fails' raised while loading", "KeyError: 'missing'", "own_tasks.py:"],
        ),
        ("own_tasks:other", ["other must return a gradwire.Task, got a int"]),
        ("own_tasks:empty", ["'empty'", "train_samples", "at least 1", "got 0"]),
        ("own_tasks:not_made", ["'odd'", "model", "expected a function, got a object", "pass a function"]),
        (
            "broken_tasks:make",
            ["importing broken_tasks raised", "No module named 'a_module_that_is_not_there'"],
        ),
        ("wrong_tasks:make", ["importing wrong_tasks raised SyntaxError"]),
        ("script_tasks:make", ["importing script_tasks raised SystemExit: 0", "script_tasks.py:2"]),
        ("own_tasks:leaves", ["'own_tasks:leaves' raised while loading", "SystemExit: 0"]),
    ],
)
def test_a_task_that_fails_is_told_from_a_wrong_spec(spec: str, words: list[str]) -> None:
    with pytest.raises(TaskError) as caught:
        load(spec)
    assert not isinstance(caught.value, TaskSpecError)
    assert [word for word in words if word not in str(caught.value)] == []


def test_digits_are_those_of_scikit_learn_and_do_not_import_it() -> None:
    """Importing it takes more than a second of CPU at the start of every worker (finding S5)."""
    program = """
import sys
from gradwire.worker.tasks.digits import LARGEST_PIXEL, SPLIT_SEED, VALIDATION_SAMPLES, _load
images, _, _, labels = _load()
assert not {"sklearn", "scipy", "numba", "torch._dynamo"} & sys.modules.keys()
import numpy as np, torch
from sklearn.datasets import load_digits
expected = load_digits()
order = np.random.RandomState(SPLIT_SEED).permutation(len(expected.target))
train, validation = order[VALIDATION_SAMPLES:], order[:VALIDATION_SAMPLES]
assert torch.equal(images, torch.as_tensor(expected.data[train] / LARGEST_PIXEL, dtype=torch.float32))
assert torch.equal(labels, torch.as_tensor(expected.target[validation]))
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_worker_joins_without_compiler_and_kernels() -> None:
    program = """
import sys
import gradwire.worker.daemon
print(*({"torch._dynamo", "numba", "llvmlite", "scipy", "sklearn"} & sys.modules.keys()))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""


def test_digits_without_scikit_learn_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(TaskError, match=r"needs scikit-learn, .*pip install '\.\[run\]'"):
        load("digits")


def test_importing_the_package_leaves_torch_alone() -> None:
    program = "import sys, gradwire.worker.tasks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    "name",
    [f"{name}:synthetic=200" if name not in ("digits", "characters") else name for name in BUILT_IN_TASKS],
)
def test_built_in_names_are_importable(name: str) -> None:
    assert load(name).train_samples > 0


@pytest.mark.parametrize(
    ("spec", "own", "allowed", "words"),
    [
        ("os:system:command=false", "", (), "start the worker with --allow-task os, or with --task os:sys"),
        ("os.path:join", "", ("os",), "--allow-task os.path"),
        ("own_tasks:make", "own_tasks:anything", ("own_tasks",), "started with --task own_tasks:anything"),
        ("own_tasks:make:width=4", "own_tasks:make", (), "was started with --task own_tasks:make"),
        ("digits", "digits:model=cnn", (), "was started with --task digits:model=cnn"),
        ("characters:data=/secret", "", ("characters",), "with --task characters:data=/secret"),
        ("characters:data=/secret", "characters:data=/own", (), "started with --task characters:data=/own"),
        (
            "own_tasks:Task:name=x",
            "",
            ("own_tasks",),
            "not defined in own_tasks but in gradwire.worker.tasks",
        ),
    ],
)
def test_a_task_that_the_worker_was_not_told_to_run_is_refused(
    spec: str, own: str, allowed: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        load_allowed(spec, own=own, allowed=allowed)


def test_nothing_is_imported_for_a_task_that_is_refused() -> None:
    with pytest.raises(UsageError):
        load_allowed("own_tasks:make", own="", allowed=("other",))
    assert "own_tasks" not in sys.modules


@pytest.mark.parametrize(
    ("spec", "own", "allowed"),
    [
        ("digits", "", ()),
        ("digits:model=mlp", "digits:model=mlp", ()),
        ("characters:characters=5000", "", ()),
        (f"characters:data={__file__}", f"characters:data={__file__}", ()),
        ("own_tasks:make:width=4,deep=on", "", ("other", "own_tasks")),
        ("own_tasks:make:width=4,deep=on", "own_tasks:make:deep=on,width=4", ()),
    ],
)
def test_a_task_that_the_worker_was_told_to_run_is_made(
    spec: str, own: str, allowed: tuple[str, ...]
) -> None:
    assert load_allowed(spec, own=own, allowed=allowed).train_samples


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a distribution is installed that declares tasks of `own_tasks`."""
    points = EntryPoints(
        EntryPoint(name, f"own_tasks:{attribute}", "gradwire.tasks")
        for name, attribute in [("mine", "make"), ("reads", "reads"), ("lost", "gone"), ("odd", "constant")]
    )

    def entry_points(**wanted: Any) -> EntryPoints:
        return points.select(**wanted)

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    monkeypatch.syspath_prepend(str(Path.cwd()))


@pytest.mark.usefixtures("offer")
def test_a_task_of_another_distribution_is_found_by_its_name() -> None:
    assert load("mine:width=8").name == "(8, 0.5, False, 'a', None)"
    check_task("mine:deep=on")
    for spec, words in (
        ("mine:depth=2", "unknown option 'depth'"),
        ("odd", "odd must be a function, but is a int"),
        ("min", "known tasks: .*digits, .*lost, mine, .*odd, reads"),
    ):
        with pytest.raises(TaskSpecError, match=words):
            load(spec)
    with pytest.raises(TaskError, match="'lost': loading own_tasks:gone of own_tasks:gone raised Attribute"):
        load("lost")


@pytest.mark.usefixtures("offer")
def test_a_server_chooses_a_distributions_task_only_where_the_worker_allows_it() -> None:
    with pytest.raises(UsageError, match="with --allow-task mine, or with --task mine"):
        load_allowed("mine", own="", allowed=())
    assert "own_tasks" not in sys.modules
    assert load_allowed("mine", own="", allowed=("mine",)).train_samples
    assert load_allowed("mine", own="mine", allowed=()).train_samples
    with pytest.raises(UsageError, match="names a file to read as data"):
        load_allowed("reads:data=/secret", own="", allowed=("reads",))
