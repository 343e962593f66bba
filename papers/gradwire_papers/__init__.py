"""The source papers beside Gradwire: their tasks, networks, and every table and figure measured again.

It is a package of its own, which uses the public names of Gradwire alone and brings its tasks by entry
points. A test holds it to that.
"""
