"""Faults made on purpose, in real processes, at random moments: nothing may be lost or doubled.

    python -m tests.faults --seed 1 --faults 100

A scenario is one small study, started again and again. Each start is disturbed and ended by a
fault; between two starts files are damaged. The last start runs to the end, and the study's
tables must equal those of a study that nobody disturbed.
"""
