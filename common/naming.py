"""Checks of names and texts that users and workers choose, and their form in files and messages.

A *name*, such as a worker's id, is checked where it enters (`why_no_name`): it becomes part of file names and
URLs, and of a line of a token file. A *label*, such as the name of a metric or tensor, is read by people and
programs, and has no character that changes a line or a terminal (`why_no_label`). `printable` escapes any
other text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
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
_OWN_DIGITS = secrets.token_hex(3)  # the same while this process lives
_SHORT = 32  # characters of the names that a shortened file name shows


class LabelledEnum(IntEnum):
    """Base class of enumerations whose members appear in messages and metric labels."""

    @property
    def label(self) -> str:
        """Name in lower case, for messages and metric labels."""
        return self.name.lower()


def why_no_name(text: str) -> str:
    """Return why `text` is not a valid name, as a clause that begins with "expected"; empty if it is."""
    return "" if _NAME.fullmatch(text) else f"expected {NAME_RULE}, got {shown(text)}"


def why_no_label(text: str, most: int = MAX_LABEL_CHARACTERS) -> str:
    """Return why `text` is not a valid label, as a clause that begins with "expected"; empty if it is."""
    if 0 < len(text) <= most and text.isprintable() and text == text.strip():
        return ""
    return f"expected 1 to {most} printable characters without spaces around them, got {shown(text)}"


def why_no_token(text: str) -> str:
    """Return why `text` is not a valid token, without quoting it; empty if it is valid."""
    if text.isascii() and text.isprintable() and " " not in text:
        return ""
    return "expected printable ASCII characters without spaces, such as the output of openssl rand -hex 32"


def shown(text: str) -> str:
    """Return `text` in quotes; of more than 40 characters, the first 40 and their number."""
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}… of {len(text)} characters"


def own_name() -> str:
    """Return the default id of a worker: host name, process id and six random digits.

    The digits tell containers apart that share the host's name, in each of which the worker is process 1.
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")[: MAX_NAME_CHARACTERS // 2]
    return f"{host or 'worker'}-{os.getpid()}-{_OWN_DIGITS}"


def file_name(*names: str) -> str:
    """Return a file name that is unique to this list of names, also in file systems that ignore case.

    Short names of lower-case letters, digits, '_' and '-' are kept and joined by dots. Other lists are
    shortened, and a digest of the whole list is appended.
    """
    if all(_FILE_NAME.fullmatch(name) for name in names):
        return ".".join(names)
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    readable = re.sub(r"[^a-z0-9_-]+", "-", ".".join(names)[:_SHORT].lower()).strip("-_")
    return f"{readable or 'name'}~{digest[:20]}"


def printable(text: str) -> str:
    """Return `text` as one line of printable characters.

    Control characters, line breaks and characters that change the direction of writing are escaped as in
    Python.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
