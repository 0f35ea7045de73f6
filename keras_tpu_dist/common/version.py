"""The version of this package, also where it runs without being installed."""

__version__ = "0.2.0"
