"""What was run, how and on what, in the words of a method section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.summary import lr_text

if TYPE_CHECKING:
    from analysis.load import Results
    from tune_study.config import Criterion


def rows(results: Results) -> list[tuple[str, str]]:
    """Names and values: grid, model, training, data, rules, margins, device, versions."""
    study, cells, manifest = results.study, results.cells, results.manifest
    base, criterion, margins = study.base, study.criterion, study.margins
    lrs = sorted(cells["lr"].unique())

    def known(column: str) -> str:
        values = cells.loc[~cells["state"].isin(["missing", "untried"]), column].dropna()
        return ", ".join(map(str, sorted(set(values) - {""}))) or "unknown"

    params = cells.loc[cells["params"] > 0, "params"]
    size = f", {params.min():,} to {params.max():,} parameters" if len(params) else ""
    return [
        ("learning rates", f"{len(lrs)} from {lr_text(lrs[0])} to {lr_text(lrs[-1])}, peak"),
        ("depths", ", ".join(map(str, sorted(cells["depth"].unique())))),
        ("seeds", ", ".join(map(str, sorted(cells["seed"].unique())))),
        ("model", f"width {base.width}, {base.heads} heads, context {base.context}{size}"),
        (
            "training",
            f"{base.steps} steps of {base.tokens_per_step:,} tokens, warm-up {base.warmup_steps}, "
            f"AdamW, {base.decay_mode} weight decay {base.weight_decay:g}, clip {base.grad_clip:g}",
        ),
        (
            "data",
            f"{manifest.get('corpus', 'unknown')}, {manifest.get('vocab_size', 'unknown')} tokens, "
            f"checksum {str(manifest.get('checksum', 'unknown'))[:12]}",
        ),
        (
            "divergence",
            f"{criterion.name}: {_rules(criterion)}"
            + ("; stopped there" if criterion.stop else "; nothing is stopped"),
        ),
        ("failure", f"normalised final loss above {criterion.failed_margin:g}"),
        (
            "margins",
            ", ".join(
                f"{name.replace('_', ' ')} {value:g}"
                for name, value in margins.model_dump(exclude={"lr_range"}).items()
                if value is not None
            )
            + ("" if margins.target_loss else "; no target loss, so steps to one are not compared"),
        ),
        ("device", f"{known('device')}; {known('precision')}; threads {known('threads')}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in results.versions.items())),
    ]


def _rules(criterion: Criterion) -> str:
    """What counts as divergence, in words."""
    rules = []
    if criterion.max_logit is not None:
        plateau = criterion.plateau
        where = "" if plateau is None else f" at a loss of {plateau:g} H1 or more"
        rules.append(f"attention logit above {criterion.max_logit:g}{where}")
    if criterion.loss_above_init:
        rules.append("training loss above the loss at init")
    in_a_row = [f"{' or '.join(rules)}, {criterion.patience} reports in a row"] if rules else []
    return "; or ".join([*in_a_row, "a value that is not finite"])
