"""The lint of the English notices each kind of fault, and lets plain sentences pass."""

from __future__ import annotations

import subprocess

import pytest

from . import prose

FUNCTION = '''
def {name}() -> None:
    """{docstring}"""
'''


def faults(source: str, *, test: bool = False) -> list[str]:
    return [fault for _, fault in prose.faults_of_code(source, test=test)]


@pytest.mark.parametrize(
    "docstring",
    [
        "Of that push.",
        "What is sent.",
        "A push of a worker.",
        "Return whatever is left.",
        "Return " + "very " * 35 + "much.",
    ],
)
def test_a_docstring_that_is_no_sentence_or_a_riddle_is_noticed(docstring: str) -> None:
    assert len(faults(FUNCTION.format(name="take", docstring=docstring))) >= 1


def test_a_property_and_a_private_function_may_begin_with_a_noun() -> None:
    assert faults(FUNCTION.format(name="_size", docstring="Bytes of the payload.")) == []
    assert (
        faults("@property\n" + FUNCTION.format(name="size", docstring="Bytes of the payload.").lstrip()) == []
    )
    assert len(faults(FUNCTION.format(name="size", docstring="Bytes of the payload."))) == 1


def test_tests_may_describe_a_case_but_not_begin_with_a_fragment() -> None:
    assert (
        faults(
            FUNCTION.format(name="case", docstring="A worker that is killed, whatever it does."), test=True
        )
        == []
    )
    assert len(faults(FUNCTION.format(name="case", docstring="Of two workers one."), test=True)) == 1


def test_neighbouring_comment_lines_are_one_text() -> None:
    lines = "\n".join(["# " + "word " * 12] * 3)
    assert len(faults(f"{lines}\n# end.\nx = 1\n")) == 1
    assert faults(lines.replace("\n", "\nx = 1\n") + "\nx = 2\n") == []


def test_replaced_names_are_noticed_in_code_and_pages() -> None:
    assert faults("class Came: ...\n") == ["Came is called PartArrival now"]
    assert [each for _, each in prose.faults_of_page("A `Came` is passed on.\n")] == [
        "Came is called PartArrival now"
    ]


def test_of_a_page_code_tables_headings_and_questions_are_left_alone() -> None:
    page = "# What it is\n\n| what | it |\n\n    what = 1\n\nWhat is it?\n\n```\nwhat\n```\n"
    assert list(prose.faults_of_page(page)) == []
    assert len(list(prose.faults_of_page(page + "\nIt sends what is left.\n"))) == 1


def test_code_in_backticks_counts_as_one_word() -> None:
    assert list(prose.sentences("Run `a b c d`. Then stop.")) == ["Run code.", "Then stop."]


@pytest.mark.parametrize("name", prose.NAMES.values())
def test_the_name_of_today_is_in_the_code(name: str) -> None:
    search = ["git", "grep", "-qw", name, "--", "*.py", ":!tests"]
    assert subprocess.run(search, cwd=prose.ROOT).returncode == 0
