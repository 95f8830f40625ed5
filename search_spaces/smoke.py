"""Everything the pilot does, in under a minute: for tests, and to see that it works."""

from search_spaces.pilot import STUDY as PILOT
from tune_study.config import DataConfig

STUDY = PILOT.replace(
    name="smoke",
    description="a handful of short cells that exercise the whole path",
    base=PILOT.base.replace(
        steps=60,
        warmup_steps=10,
        report_every=10,
        val_windows=32,
        data=DataConfig(vocab_size=300, train_documents=2_000, validation_documents=300),
    ),
    axes={"lr": (1e-2, 1e-1, 1.0), "depth": (1, 2), "qk_norm": ("off", "rmsnorm"), "seed": (0, 1)},
)
