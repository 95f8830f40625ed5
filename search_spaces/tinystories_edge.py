"""Best LR and maximum stable LR on TinyStories at an eighth of a decade, by search."""

from search_spaces.tinystories import STUDY as TINYSTORIES
from tune_study.config import Search, log_grid

STUDY = TINYSTORIES.replace(
    name="tinystories-edge",
    description="the best and maximum stable LRs at 10 to 15 million parameters, by search",
    axes=dict(TINYSTORIES.axes) | {"lr": log_grid(3e-4, 3e-1, per_decade=8)},
    search=Search(),
)
