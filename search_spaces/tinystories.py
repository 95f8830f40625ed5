"""The real study: TinyStories (Eldan and Li 2023) at 10, 12.5 and 15 million parameters."""

from tune_study.config import DataConfig, Margins, Study, TrialConfig, log_grid

STUDY = Study(
    name="tinystories",
    description="QK-norm off and on at 10 to 15 million parameters on TinyStories",
    base=TrialConfig(
        width=320,
        heads=5,
        context=256,
        batch_size=32,
        steps=2_000,
        warmup_steps=200,
        report_every=50,
        val_windows=128,
        data=DataConfig(corpus="tinystories", tokenizer="bpe", vocab_size=8192),
        device="auto",
        threads=0,
    ),
    axes={
        "lr": log_grid(3e-4, 3e-1, per_decade=4),
        "depth": (6, 8, 10),
        "qk_norm": ("off", "rmsnorm"),
        "seed": (0, 1, 2),
    },
    margins=Margins(target_loss=4.0),
    checkpoint_every_s=300,
)
