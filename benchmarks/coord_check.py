"""The coordinate check: do activations change as much at every width? With muP they should.

    python -m benchmarks.coord_check [--widths 32,64,128,256,512] [--out FOLDER]

Trains a few steps at one learning rate, in the standard parametrisation and with muP, and measures
how far each coordinate of attention logits, residual stream and output logits has moved since
initialisation (Yang et al. 2022, 2203.03466, figure 5). Each quantity's exponent is the
slope of log change against log width: well above 0 it grows with width, near 0 it does not.
The base shape, at which both parametrisations are the same model, is width 32 with heads of 16;
the number of heads stays 2, so that heads widen too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import torch
from torch import Tensor

from tune_study.config import DataConfig, TrialConfig
from tune_study.data import Tokens, open_tokens, prepare
from tune_study.model import GPT
from tune_study.trainer import Trainer

PARAMETRISATIONS = ("standard", "mup")
DATA = DataConfig(vocab_size=512, train_documents=2_000, validation_documents=200)


def main() -> None:
    """Prints the exponents, and writes table and figure if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--widths", default="32,64,128,256,512")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for coord_check.json, .png and .svg")
    options = parser.parse_args()
    widths = [int(width) for width in options.widths.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        prepare(DATA, Path(scratch), say=lambda line: None)
        tokens = open_tokens(DATA, Path(scratch))
        table = measure(tokens, widths, options.lr, options.steps, range(options.seeds))
    found = exponents(table)
    print(found.pivot(index="what", columns="parametrisation", values="exponent").round(2))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        content = {"changes": table.to_dict("records"), "exponents": found.to_dict("records")}
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        (options.out / "coord_check.json").write_text(text, encoding="utf-8")
        for ending in ("png", "svg"):
            draw(table).save(options.out / f"coord_check.{ending}", ppi=200)
        print(f"Written: {options.out}")


def measure(
    tokens: Tokens, widths: Sequence[int], lr: float, steps: int, seeds: Sequence[int]
) -> pd.DataFrame:
    """One row a (parametrisation, width, seed, step, what).

    Returns:
        DataFrame: those, and `change`: root mean square over all coordinates of x(step) - x(0).
    """
    rows: list[dict[str, Any]] = []
    for parametrisation in PARAMETRISATIONS:
        for width in widths:
            for seed in seeds:
                config = TrialConfig(
                    parametrisation=parametrisation, width=width, seed=seed, lr=lr, device="cpu",
                    steps=1000, warmup_steps=0, data=DATA,
                )  # fmt: skip
                trainer = Trainer(config, tokens)
                start = coordinates(trainer.model, trainer.probe_ids)
                for step in range(1, steps + 1):
                    trainer.train(1)
                    key = {"parametrisation": parametrisation, "width": width, "seed": seed}
                    for what, now in coordinates(trainer.model, trainer.probe_ids).items():
                        change = (now - start[what]).square().mean().sqrt().item()
                        rows.append(key | {"step": step, "what": what, "change": change})
    return pd.DataFrame(rows)


@torch.no_grad()
def coordinates(model: GPT, ids_BT: Tensor) -> dict[str, Tensor]:
    """The last block's attention logits (those seen) and output, and the output logits."""
    x_BTC = model.embed(ids_BT)
    for block in model.blocks:
        q_BHTD, k_BHTD, _ = block.attention.project(block.attention_norm(x_BTC))
        logits_BHTT = block.attention.logits(q_BHTD, k_BHTD)
        x_BTC, _ = block(x_BTC)
    return {
        "attention logits": logits_BHTT[logits_BHTT.isfinite()],
        "residual stream": x_BTC,
        "output logits": model.unembed(x_BTC),
    }


def exponents(table: pd.DataFrame) -> pd.DataFrame:
    """Slope of log change against log width at the last step, by parametrisation and what."""
    last = table[table["step"] == table["step"].max()]
    rows = []
    for (parametrisation, what), group in last.groupby(["parametrisation", "what"]):
        slope = np.polyfit(np.log(group["width"]), np.log(group["change"]), 1)[0]
        rows.append({"parametrisation": parametrisation, "what": what, "exponent": float(slope)})
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame) -> alt.FacetChart:
    """Change against width: a column for each quantity, a row for each parametrisation."""
    means = table.groupby(["parametrisation", "what", "width", "step"], as_index=False)
    means = means["change"].mean()
    means["parametrisation"] = means["parametrisation"].map(
        {"standard": "standard parametrisation", "mup": "muP"}
    )
    change = alt.Axis(values=[10.0**k for k in range(-9, 10)], format="~g", gridOpacity=0.5)
    width = alt.Axis(values=sorted(means["width"].unique()), gridOpacity=0.5)
    lines = (
        alt.Chart(means)
        .mark_line(point=True)
        .encode(
            x=alt.X("width:Q", scale=alt.Scale(type="log", base=2), axis=width),
            y=alt.Y("change:Q", scale=alt.Scale(type="log"), axis=change, title="change"),
            color=alt.Color("step:O", scale=alt.Scale(scheme="viridis"), title="step"),
        )
        .properties(width=170, height=120)
    )
    rows = alt.Row("parametrisation:N", title=None, sort=["standard parametrisation", "muP"])
    chart = lines.facet(row=rows, column=alt.Column("what:N", title=None))
    return chart.properties(title="Root mean square of x(step) - x(0), over all coordinates")


if __name__ == "__main__":
    main()
