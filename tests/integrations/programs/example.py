"""Runs a script as `python PATH ARGUMENTS` would, with its output on standard error, which the test reads."""

from __future__ import annotations

import runpy
import sys

sys.stdout = sys.stderr
sys.argv[:] = sys.argv[1 : sys.argv.index("--http-port")]  # the options of every daemon follow
runpy.run_path(sys.argv[0], run_name="__main__")
