"""Names and texts that users and workers choose, and where they must not be taken for something else.

A *name*, such as a worker's id, is checked where it enters (`why_no_name`): it becomes part of file names and
URLs, and a line of a token file. A *label*, such as a metric's or a tensor's name, is for people and programs
to read, and has no characters that change a line or a terminal (`why_no_label`). Any other text is shown by
`printable`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from enum import IntEnum

MAX_NAME_CHARACTERS = 128
MAX_LABEL_CHARACTERS = 128
NAME_RULE = (
    f"1 to {MAX_NAME_CHARACTERS} characters, of ASCII letters, digits, '.', '_' and '-', the first of which "
    "is a letter or a digit"
)
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARACTERS - 1}}}")
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_SHORT = 32  # characters of a name that a file name shows where it cannot have all


class LabelledEnum(IntEnum):
    @property
    def label(self) -> str:
        """Lower-case name, for messages and metric labels."""
        return self.name.lower()


def why_no_name(text: str) -> str:
    """Return why a text is no name, in words that begin with "expected"; empty if it is one."""
    return "" if _NAME.fullmatch(text) else f"expected {NAME_RULE}, got {shown(text)}"


def why_no_label(text: str, most: int = MAX_LABEL_CHARACTERS) -> str:
    """Return why a text is no label, in words that begin with "expected"; empty if it is one."""
    if 0 < len(text) <= most and text.isprintable() and text == text.strip():
        return ""
    return f"expected 1 to {most} printable characters without spaces around them, got {shown(text)}"


def why_no_token(text: str) -> str:
    """Return why a text can be no token, without the text; empty if it can."""
    if text.isascii() and text.isprintable() and " " not in text:
        return ""
    return "expected ASCII letters, digits and signs without spaces, as openssl rand -hex 32 makes them"


def shown(text: str) -> str:
    """Return a text in quotes, shortened if it is long."""
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}… of {len(text)} characters"


def own_name() -> str:
    """Return the id of a worker that was given none: host name and process id."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")[: MAX_NAME_CHARACTERS // 2]
    return f"{host or 'worker'}-{os.getpid()}"


def file_name(*names: str) -> str:
    """Return a file name for a list of names, which no other list has, also where case does not count.

    Short names of lower-case letters, digits, '_' and '-' stay as they are, with dots between. Anything else
    is shortened, with a digest behind it.
    """
    if all(_FILE_NAME.fullmatch(name) for name in names):
        return ".".join(names)
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    readable = re.sub(r"[^a-z0-9_-]+", "-", ".".join(names)[:_SHORT].lower()).strip("-_")
    return f"{readable or 'name'}~{digest[:20]}"


def printable(text: str) -> str:
    """Return a text as one line on which every character stands for itself: controls, line breaks and what
    turns the direction of writing are escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
