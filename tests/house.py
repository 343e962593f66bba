"""The size of the house, beside its budget: `make house` writes the table of CONTRIBUTING.md.

    python tests/house.py             # print the table
    python tests/house.py --check     # name each figure that is over its budget; the exit status is then 1
    python tests/house.py --way       # also train, and list the files that run in ordinary steps
    python tests/house.py --write     # the same, and put the table into CONTRIBUTING.md

`house.toml` has the budget. A change that needs more lines than a room has left takes lines away elsewhere,
or raises the budget and says why. Counted are the files that git tracks:

- code: lines of Python without blank lines, docstrings and comments;
- text: lines of docstrings and comments;
- verbs: unrelated bodies of one public method name in the rooms that a gradient passes. Classes that inherit
  from each other count once, because they give one method;
- words: Markdown for readers, which is README, ARCHITECTURE, CONTRIBUTING and docs/.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "tests" / "house.toml"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- house: made by `make house` -->\n", "<!-- end of house -->\n"
LONG = 450
READERS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/")
WAY = ("worker/training/", "worker/session/", "compressors/", "server/", "ddp/")
NOT_ON_THE_WAY = ("compressors/kernels/", "server/recovery/")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """A file of Python: its lines of each kind, and its tree."""

    name: str
    code: int
    text: int
    lines: int
    tree: ast.Module


def tracked(*patterns: str) -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [name for name in listing.stdout.split() if (ROOT / name).exists()]


def source(name: str, text: str) -> Source:
    tree = ast.parse(text)
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            inside.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    kinds: Counter[str] = Counter()
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            kinds["text" if number in inside or line.lstrip().startswith("#") else "code"] += 1
    return Source(name, kinds["code"], kinds["text"], len(lines), tree)


def room_of(name: str, rooms: Iterable[str]) -> str:
    """Return the room with the longest path that holds a file; `.` for the files at the root."""
    return max((room for room in rooms if name.startswith(f"{room}/")), key=len, default=".")


def families(classes: Iterable[ast.ClassDef]) -> dict[str, str]:
    """Return for each class name the first ancestor among these classes."""
    parents = {
        node.name: [
            base.id if isinstance(base, ast.Name) else base.attr
            for base in (b.value if isinstance(b, ast.Subscript) else b for b in node.bases)
            if isinstance(base, ast.Name | ast.Attribute)
        ]
        for node in classes
    }

    def first(name: str) -> str:
        known = [parent for parent in parents[name] if parent in parents and parent != name]
        return first(known[0]) if known else name

    return {name: first(name) for name in parents}


def bodies(sources: Iterable[Source]) -> dict[str, set[str]]:
    """Return for each public method name the families of classes that define it."""
    classes = [node for file in sources for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)]
    family = families(classes)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for node in classes:
        for method in node.body:
            if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or method.name.startswith("_"):
                continue
            if not any(ast.unparse(decorator) == "property" for decorator in method.decorator_list):
                found[method.name].add(family[node.name])
    return found


@dataclass(frozen=True)
class Figure:
    kind: str
    value: int
    budget: int
    room: str = ""  # empty for the whole house
    worst: str = ""  # what a reader looks at first if the figure is over its budget


def figures(budget: dict[str, dict[str, int]]) -> Iterator[Figure]:
    """Yield each figure of the budget. A room that the budget lacks counts with what is around it."""
    sources = [source(name, (ROOT / name).read_text()) for name in tracked("*.py")]
    package = [file for file in sources if not file.name.startswith(("tests/", "papers/", "examples/"))]
    house = budget["house"]
    for kind in ("code", "text"):
        spent: Counter[str] = Counter()
        for file in sources:
            spent[room_of(file.name, budget[kind])] += getattr(file, kind)
        yield from (Figure(kind, spent[room], most, room) for room, most in budget[kind].items())
        yield Figure(kind, sum(getattr(file, kind) for file in package), house[kind], "the package")
    long = sorted((file for file in package if file.lines > LONG), key=lambda file: -file.lines)
    names = ", ".join(f"{file.name} {file.lines}" for file in long)
    yield Figure(f"files over {LONG} lines", len(long), house["files_over_450"], worst=names)
    classes = ((node, file) for file in package for node in ast.walk(file.tree))
    lengths = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{file.name} {node.name}")
        for node, file in classes
        if isinstance(node, ast.ClassDef)
    ]
    longest, where = max(lengths)
    yield Figure("lines of the longest class", longest, house["longest_class"], worst=where)
    on_the_way = [f for f in package if f.name.startswith(WAY) and not f.name.startswith(NOT_ON_THE_WAY)]
    found = bodies(on_the_way)
    many = sorted((name for name in found if len(found[name]) > 3), key=lambda name: -len(found[name]))
    listed = "; ".join(f"{name}: {', '.join(sorted(found[name]))}" for name in many)
    yield Figure("verbs of over 3 bodies on the way", len(many), house["verbs_over_3_bodies"], worst=listed)
    pages = [name for name in tracked("*.md") if name.startswith(READERS)]
    words = sum(len((ROOT / name).read_text().split()) for name in pages)
    yield Figure("words for readers", words, house["words"])


def table(rows: Sequence[Figure]) -> str:
    """Return the rows of rooms, with both kinds of lines in one row, and those of the house."""
    lines = {kind: {row.room: row for row in rows if row.kind == kind} for kind in ("code", "text")}
    shown = ["| lines of | code | budget | text | budget |", "|---|---|---|---|---|"]
    for room, code in lines["code"].items():
        text = lines["text"][room]
        shown.append(f"| {room} | {code.value:,} | {code.budget:,} | {text.value:,} | {text.budget:,} |")
    shown += ["", "| the house | now | budget |", "|---|---|---|"]
    shown += [f"| {row.kind} | {row.value:,} | {row.budget:,} |" for row in rows if not row.room]
    return "\n".join(shown) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="print only what is over its budget")
    parser.add_argument("--write", action="store_true", help="put the table into CONTRIBUTING.md")
    parser.add_argument("--way", action="store_true", help="list the files that ordinary steps enter")
    arguments = parser.parse_args()
    budget = tomllib.loads(BUDGET.read_text())
    rows = list(figures(budget))
    if arguments.way or arguments.write:
        way = subprocess.run(
            [sys.executable, ROOT / "tests" / "way.py"], check=True, capture_output=True, text=True
        )
        entered = way.stdout.split()
        rows.append(Figure("files that a gradient enters", len(entered), budget["house"]["files_on_the_way"]))
        print(way.stdout)
    over = [row for row in rows if row.value > row.budget]
    if not arguments.check:
        print(table(rows), end="")
    for row in over:
        where = f"{row.kind} of {row.room}" if row.room else row.kind
        print(f"over budget: {where}: {row.value:,} of {row.budget:,} {row.worst}", file=sys.stderr)
    if arguments.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(before + BEGIN + "\n" + table(rows) + "\n" + END + after)
    return 1 if over and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
