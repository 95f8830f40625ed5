"""QK-norm at three widths, heads 16 wide at each: does the edge move with width as with depth?

With `--set parametrisation=mup --name width-mup` the same under muP, whose base is width 32.
"""

from search_spaces.pilot import STUDY as PILOT

WIDTHS = (32, 64, 128)

STUDY = PILOT.replace(
    name="width",
    description="QK-norm off and on at widths 32, 64 and 128, at depth 2",
    axes=dict(PILOT.axes) | {"depth": (2,), "width": WIDTHS},
    tied={"width": {width: {"heads": width // 16} for width in WIDTHS}},
)
