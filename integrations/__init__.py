"""Gradwire inside trainers that own the loop: Lightning, Accelerate, Transformers.

One module for each, which imports its framework; nothing else of Gradwire imports this room.
docs/how-to/frameworks.md shows the lines of a script that change.
"""
