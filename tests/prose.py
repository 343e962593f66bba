"""Lint the English of docstrings, comments and documentation: `python tests/prose.py [PATH ...]`, in `make
lint`.

It reports what a program can see and leaves the rest to readers:

1. A docstring that begins with a word from which no sentence follows, such as "Of" or "What".
2. A public function whose docstring does not begin with a verb (tests/verbs.txt). Properties are exempt.
3. Words that stand where a noun or a plainer word belongs (`WORDS`).
4. A sentence of more than `MAX_WORDS` words.
5. Names that the project has replaced (`NAMES`), in code and prose.

Rules 2 and 3 leave out tests. CHANGELOG.md and docs/measurements tell the past and are left out altogether.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WORDS = 35
OPENINGS = frozenset({"as", "by", "of", "that", "what", "whatever", "which", "who", "whose", "from", "so"})
VERBS = frozenset((ROOT / "tests" / "verbs.txt").read_text().split())
# "Say what is missing" is plain; "send what is missing" hides the noun.
_AFTER = "".join(
    rf"(?<!{verb} )"
    for verb in (
        "say",
        "says",
        "said",
        "tell",
        "tells",
        "decide",
        "decides",
        "know",
        "knows",
        "show",
        "shows",
        "see",
        "ask",
        "explain",
    )
)
WORDS = {
    r"whoever|whomever": "name the actor",
    r"whatever": "name the thing",
    r"perhaps": "may",
    r"nobody": "no worker, no process, no user",
    r"so many": "n, or the number of",
    r"of no use": "unused",
    r"goes? on|went on": "continue, resume",
    rf"{_AFTER}what": "a noun: bytes, message, error",
    r"who (is|are|was|has|have|can|may|comes?|came)\b": "name the actor",
}
NAMES = {  # replaced name: name of today
    "Came": "PartArrival",
    "Pacing": "RateControl",
    "Turn": "TrainingStep",
    "Vacate": "MemberLost",
    "Refill": "Substitute",
    "Intake": "PushLedger",
    "Rated": "RatesReceived",
    "still_s": "stalled_s",
}
LEFT_OUT = re.compile(
    r"_pb2|^proto/messages\.py$|^CHANGELOG\.md$|^records/|^tests/prose\.py$|^tests/test_prose\.py$"
)

_WORDS = re.compile("|".join(rf"\b(?:{words})\b" for words in WORDS), re.I)
_NAMES = re.compile(rf"\b({'|'.join(NAMES)})\b")
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\[([^\]]*)\]\([^)]*\)|https?://\S+")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"”]*\s+(?=[A-Z(\"“`])|\n\s*\n")
_ENTRY = re.compile(
    r"^\s*(?:[-*+] |\d+\. |[A-Z]  |python |[\w`*, .]{1,60}: )", re.M
)  # of a list, or of "Args:"


_EXAMPLE = re.compile(r"^ *(?:Example:|>>> .*|\.\.\. .*)(?:\n|$)", re.M)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. Code in backticks counts as one word; entries of lists stand apart, and
    examples are left out."""
    text = _EXAMPLE.sub("\n", text)
    plain = _CODE.sub(lambda match: match[1] or "code", text)
    for block in _ENTRY.sub(lambda match: "\n\n" + match[0], plain).split("\n\n"):
        if "|" not in block:
            yield from (" ".join(each.split()) for each in _SENTENCE_END.split(block) if each.strip())


def faults_of_prose(text: str, *, words: bool = True) -> Iterator[str]:
    """Yield the faults of a text: long sentences and, if `words` is True, the words of rule 3."""
    for sentence in sentences(text):
        count = len(sentence.split())
        if count > MAX_WORDS:
            yield f'{count} words in a sentence, at most {MAX_WORDS}: "{sentence[:60]} …"'
        if words and not sentence.endswith("?"):
            for match in _WORDS.finditer(sentence):
                remedy = next(
                    why for each, why in WORDS.items() if re.search(rf"\b(?:{each})\b", match[0], re.I)
                )
                context = sentence[max(0, match.start() - 20) : match.end() + 20]
                yield f'"{context}": instead of "{match[0]}", {remedy}'


def faults_of_docstring(node: ast.AST, docstring: str, *, public: bool) -> Iterator[str]:
    """Yield the faults of a docstring's first word. public: rule 2 applies."""
    first = re.sub(r"\W", "", docstring.split(maxsplit=1)[0]).lower()
    if first in OPENINGS:
        yield f'docstring begins with "{first}": begin with a verb or a noun'
    elif public and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and first not in VERBS:
        decorators = {ast.unparse(each).split(".")[-1] for each in node.decorator_list}
        hidden = node.name.startswith("_") or decorators & {"property", "cached_property", "setter"}
        if not hidden:
            yield f'docstring of {node.name} begins with "{first}": begin with a verb (tests/verbs.txt)'


def faults_of_code(source: str, *, test: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, fault) for a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                line = node.body[0].lineno
                for fault in faults_of_docstring(node, docstring, public=not test):
                    yield line, fault
                yield from ((line, fault) for fault in faults_of_prose(docstring, words=not test))
    comment, start, last = "", 0, 0  # lines below each other are one text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in NAMES:
            yield token.start[0], f"{token.string} is called {NAMES[token.string]} now"
        if token.type == tokenize.COMMENT:
            behind_code = token.line[: token.start[1]].strip()
            if comment and (behind_code or token.start[0] != last + 1):
                yield from ((start, fault) for fault in faults_of_prose(comment, words=not test))
                comment = ""
            start, last = start if comment else token.start[0], token.start[0]
            comment += token.string.lstrip("#") + "\n"
    yield from ((start, fault) for fault in faults_of_prose(comment, words=not test))


def faults_of_page(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield (line, fault) for a page of Markdown, without its code, tables and headings."""
    without = re.sub(
        r"^```[\s\S]*?^```|^ {4,}.*$|^\|.*$|^#.*$",
        lambda match: "\n" * match[0].count("\n"),
        markdown,
        flags=re.M,
    )
    line = 1
    for block in re.split(r"(\n\s*\n)", without):
        yield from (
            (line + block[: len(block) - len(block.lstrip())].count("\n"), each)
            for each in faults_of_prose(block)
        )
        line += block.count("\n")
    for match in _NAMES.finditer(without):
        yield without.count("\n", 0, match.start()) + 1, f"{match[0]} is called {NAMES[match[0]]} now"


def main(arguments: Iterable[str] | None = None) -> int:
    """Print the faults of all tracked files, or of those that are named; return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Lint docstrings, comments and documentation.")
    parser.add_argument("paths", nargs="*", help="files or folders, relative to the root; all by default")
    wanted: list[str] = parser.parse_args(None if arguments is None else list(arguments)).paths
    tracked = subprocess.check_output(["git", "ls-files", "--", *wanted], cwd=ROOT, text=True).split()
    count = 0
    for path in tracked:
        if LEFT_OUT.search(path) or not path.endswith((".py", ".md")):
            continue
        text = (ROOT / path).read_text()
        faults = (
            faults_of_page(text)
            if path.endswith(".md")
            else faults_of_code(text, test=path.startswith(("tests/", "papers/tests/")))
        )
        for line, fault in sorted(faults):
            print(f"{path}:{line}: {fault}")
            count += 1
    print(f"{count} faults")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
