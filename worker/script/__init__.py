"""A worker inside a user's own script: the script keeps its loop, the server takes the step.

docs/how-to/scripts.md lists the loops that work. `api` is the part that a script sees, as `gradwire.connect`.
"""
