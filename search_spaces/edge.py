"""Best LR and maximum stable LR of the pilot at an eighth of a decade, by search.

The cells it runs are cells of `dense`: `sweep edge --name dense` searches in what is there, and
`sweep dense --name edge` runs the rest of the grid.
"""

from search_spaces.dense import STUDY as DENSE
from tune_study.config import Search

STUDY = DENSE.replace(
    name="edge",
    description="the pilot's best and maximum stable LRs at 8 a decade, 5 seeds, by search",
    search=Search(),
)
