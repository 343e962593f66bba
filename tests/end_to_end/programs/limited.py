"""gc-server with a limit of open files that it cannot raise, its first argument."""

from __future__ import annotations

import resource
import sys

from gradwire.server.cli import main

if __name__ == "__main__":
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    sys.exit(main(sys.argv[2:]))
