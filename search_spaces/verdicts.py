"""The hypotheses on the pilot at an eighth of a decade, with fewer cells than `dense`.

Every fourth learning rate runs on every line, for LR sensitivity and mean gains; the edges of
stability are searched between them; near off's edge the cells run in both arms, for the threshold.
"""

from search_spaces.dense import STUDY as DENSE
from tune_study.config import Search

STUDY = DENSE.replace(
    name="verdicts",
    description="the pilot's hypotheses with edges at 8 learning rates a decade, by search",
    search=Search(best_lr=False, every=4, threshold=True),
)
