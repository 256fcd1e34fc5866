"""The version, where the build finds it too."""

__version__ = "0.1.0"
