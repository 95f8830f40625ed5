"""Reads a study and says what it shows. `from analysis import load` starts here."""

from analysis.load import Results, load

__all__ = ["Results", "load"]
