"""All that keeps logits in check, each against the same baseline, on the pilot's grid."""

from search_spaces.pilot import STUDY as PILOT

STUDY = PILOT.replace(
    name="stabilisers",
    description="every logit control by itself, at pilot size",
    axes={"lr": PILOT.axis("lr"), "depth": (2,), "seed": (0, 1, 2)},
    # Caps and weights are those of the papers; docs/method.md names them.
    arms=(
        {},
        {"qk_norm": "rmsnorm"},
        {"qk_norm": "layernorm"},
        {"qk_norm": "l2"},
        {"attn_softcap": 50.0},
        {"final_softcap": 30.0},
        {"z_loss": 1e-4},
        {"sigma_reparam": True},
        {"normformer": "all"},
        {"qk_clip": 100.0},
    ),
)
