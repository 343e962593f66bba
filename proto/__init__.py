"""The wire between worker and server: messages as dataclasses, their bytes, and typed refusals.

This is the only room that touches a protobuf class.
"""
