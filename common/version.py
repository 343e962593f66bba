"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gradwire")
except PackageNotFoundError:  # a bare checkout on sys.path, never installed
    __version__ = "0+unknown"
