"""The pilot with every cell run to its end: what the criteria are calibrated on."""

from search_spaces.pilot import STUDY as PILOT
from tune_study.config import CRITERIA

STUDY = PILOT.replace(
    name="control",
    description="the pilot's grid without stopping, against which rules of divergence are judged",
    criterion=CRITERIA["off"],
)
