"""Gradwire: a parameter server and workers that train PyTorch models over ordinary networks.

The rooms of the package and the direction in which they may import each other are drawn in
ARCHITECTURE.md. Importing this module is cheap: it imports neither torch nor grpc.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gradwire")
except PackageNotFoundError:  # a bare checkout on sys.path, never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
