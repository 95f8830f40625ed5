"""The default study: the whole question at a size that a CPU answers in minutes."""

from tune_study.config import DataConfig, Margins, Study, TrialConfig, log_grid

STUDY = Study(
    name="pilot",
    description="QK-norm off and on over three decades of learning rate, on built-in stories",
    # Width, context and steps are the smallest at which the two arms fail at clearly
    # different learning rates; below 400 steps, or with bytes as tokens, the edge blurs.
    base=TrialConfig(
        width=32,
        heads=2,
        context=32,
        batch_size=16,
        steps=400,
        warmup_steps=40,
        report_every=20,
        val_windows=128,
        data=DataConfig(corpus="synthetic", tokenizer="bpe", vocab_size=512),
        device="cpu",
        threads=1,
    ),
    axes={
        "lr": log_grid(1e-3, 1, per_decade=4),
        "depth": (1, 2, 4),
        "qk_norm": ("off", "rmsnorm"),
        "seed": (0, 1, 2),
    },
    # Between the plateau of failed runs, H1 = 4.88, and the best losses, 0.9.
    margins=Margins(target_loss=2.0),
)
