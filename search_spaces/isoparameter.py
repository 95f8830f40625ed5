"""Depth at equal size: 12 million parameters, from 3 wide blocks to 12 narrow ones.

Beside `tinystories`, where depth adds parameters at one width. Heads are 32 wide at every depth.
"""

from search_spaces.tinystories import STUDY as TINYSTORIES
from tune_study.size import width_for

DEPTHS = (3, 4, 6, 8, 12)

STUDY = TINYSTORIES.replace(
    name="isoparameter",
    description="QK-norm off and on at 12 million parameters, 3 to 12 blocks, on TinyStories",
    axes=dict(TINYSTORIES.axes) | {"depth": DEPTHS},
    # 480, 416, 352, 320, 256 wide: 12.4, 11.8, 11.9, 12.5, 11.6 million parameters.
    tied={
        "depth": {
            depth: width_for(depth, 12_000_000, vocab_size=8192, context=256, head_width=32)
            for depth in DEPTHS
        }
    },
)
