"""Output that cannot be shown does not end a command."""

import io
import sys

import pytest

from gradwire.common.exits import Exit, command
from gradwire.deploy.console import Console


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of a C locale: surrogateescape
def test_characters_that_the_output_lacks_are_replaced(
    encoding: str, errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, errors=errors))

    @command
    def main() -> int:
        print("7.70× fewer − ≈ 4 µs, \udcff")
        Console().print("accuracy 0.949 ± 0.007 → …")
        return Exit.DONE

    assert main() == Exit.DONE
    text = written.getvalue().decode(encoding)
    assert "7.70" in text
    assert "accuracy 0.949" in text
