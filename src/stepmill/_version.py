"""The version. The build reads it from here."""

__version__ = "0.2.0"
