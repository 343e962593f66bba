"""Write the tables of gc-bench's options into docs/reference/benchmarks.md: `make docs`.

    python -m gradwire.benchmarks.reference [--check]

Separate from `deploy.reference` because deploy may not import the benchmarks.
"""

from __future__ import annotations

import sys

from ..deploy import reference
from .cli import COMMANDS, parser_of

PAGES = (reference.REFERENCE / "benchmarks.md",)


def tables() -> dict[str, str]:
    """Return the Markdown tables of all gc-bench commands' options, such as "options of gc-bench step"."""
    rows = {f"gc-bench {name}": reference.rows_of(parser_of(name)) for name in COMMANDS}
    return reference.tables_of(rows, reference.PARSER_HEAD)


if __name__ == "__main__":
    sys.exit(reference.write(sys.argv[1:], __doc__, PAGES, tables()))
