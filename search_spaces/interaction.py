"""QK-norm crossed with z-loss and with attention softcap: do they do the same, or add up?"""

from search_spaces.pilot import STUDY as PILOT

STUDY = PILOT.replace(
    name="interaction",
    description="QK-norm x z-loss and QK-norm x attention softcap, at pilot size",
    axes={"lr": PILOT.axis("lr"), "depth": (2,), "seed": (0, 1, 2)},
    arms=tuple(
        norm | other
        for other in ({}, {"z_loss": 1e-4}, {"attn_softcap": 50.0})
        for norm in ({}, {"qk_norm": "rmsnorm"})
    ),
)
