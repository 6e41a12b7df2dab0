"""The version of the library, the one place that says so."""

__version__ = "0.1.0"
