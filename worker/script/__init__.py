"""A worker inside a user's own script: the script keeps its loop, the server its part of the step.

docs/how-to/scripts.md has what works in such a loop. `api` is what a script sees of it, as `gradwire.connect`.
"""
