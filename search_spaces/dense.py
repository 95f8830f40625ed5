"""The pilot at eighth-decade learning rates with five seeds: what the edge search is judged on.

Every second learning rate is one of the pilot's, so the cells they share have the same numbers.
"""

from search_spaces.pilot import STUDY as PILOT
from tune_study.config import log_grid

STUDY = PILOT.replace(
    name="dense",
    description="the pilot with 8 learning rates a decade and 5 seeds",
    axes=dict(PILOT.axes) | {"lr": log_grid(1e-3, 1, per_decade=8), "seed": (0, 1, 2, 3, 4)},
)
