"""Fail unless the given `name==version` requirements are what this interpreter would import.

Keeps `make check-protobuf` honest: an overlay that is not on the path would test the newest versions twice.
"""

import sys
from importlib.metadata import version


def main() -> int:
    wrong = 0
    for requirement in sys.argv[1:]:
        name, wanted = requirement.split("==")
        found = version(name)
        print(f"{name} {found}")
        if not f"{found}.".startswith(f"{wanted}."):
            print(f"expected {requirement}, found {found}", file=sys.stderr)
            wrong = 1
    return wrong if sys.argv[1:] else 2


if __name__ == "__main__":
    sys.exit(main())
