"""The source papers beside Gradwire: their tasks, networks, and every table and figure measured again.

It is a package of its own, and uses of Gradwire only what any other package can: the entry points
`gradwire.tasks`, and what the modules of `gradwire` name in `__all__` or export. A test holds it to that.
"""
