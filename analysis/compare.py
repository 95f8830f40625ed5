"""Two or more studies side by side, on one page, with what differs between them named.

What depends on a setting that differs is not compared: LR sensitivity on its range of
learning rates, any loss on the data and the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis import page
from analysis.answer import answer
from analysis.convert import replace_file
from analysis.figures import figures
from analysis.plots.theme import COLUMN, WIDE, arm_colours, arm_order
from analysis.summary import edge_text, interval_text, json_safe, lr_text, summarise
from tune_study.config import ConfigError

if TYPE_CHECKING:
    from analysis.load import Results

SIDE_BY_SIDE = ("lr_loss", "max_stable_lr", "necessity")
_LOSS_DEPENDS_ON = {
    "learning rates": "axes.lr",
    "LR range": "margins.lr_range",
    "steps": "base.steps",
}


def compare(results: Sequence[Results], out: Path) -> Path:
    """Writes out/index.html with the studies side by side and returns its path.

    Raises:
        ConfigError: with fewer than two studies, or one of them twice.
    """
    _check(results)
    summaries = [json_safe(summarise(each)) for each in results]
    content = side_by_side(results, summaries)
    studies, specs = [], {}
    for each, summary in zip(results, summaries, strict=True):
        drawn = [f for f in figures(each, summary) if f.name in SIDE_BY_SIDE]
        placed = []
        for figure in drawn:
            name = f"{each.study.name} {figure.name}"
            specs[name] = {layout.name: figure.spec(layout) for layout in (COLUMN, WIDE)}
            placed.append({"name": name, "caption": figure.caption})
        studies.append({"summary": summary, "answer": answer(summary), "figures": placed})
    html = page.render_comparison(
        specs,
        studies=studies,
        colours=arm_colours({row["arm"] for row in content["rows"]}),
        **content,
    )
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / "index.html", html)
    return out / "index.html"


def side_by_side(results: Sequence[Results], summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is compared, as text: the studies' names, the settings that differ, what that makes
    incomparable, and a row for each depth and arm.

    Raises:
        ConfigError: with fewer than two studies, or one of them twice.
    """
    _check(results)
    settings = [_settings(each) for each in results]
    return {
        "names": [each.study.name for each in results],
        "differences": differences(settings),
        "refused": refused(settings),
        "rows": _rows(summaries),
    }


def _check(results: Sequence[Results]) -> None:
    names = [each.study.name for each in results]
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"studies = {', '.join(names)}: a comparison needs at least two. Name each study once."
        )


def differences(settings: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """The settings that are not the same everywhere, with each study's value."""
    names = list(dict.fromkeys(name for each in settings for name in each))
    table = [
        {"setting": name, "values": [each.get(name, "–") for each in settings]} for name in names
    ]
    return [row for row in table if len(set(row["values"])) > 1]


def refused(settings: Sequence[dict[str, str]]) -> list[str]:
    """What differs and makes losses incomparable."""
    different = {row["setting"] for row in differences(settings)}
    names = [name for name, setting in _LOSS_DEPENDS_ON.items() if setting in different]
    return [*names, *(["data"] if "data" in different else [])]


def _settings(results: Results) -> dict[str, str]:
    """Every setting of a study by its dotted name, as text."""
    study = results.study.model_dump(mode="json", exclude={"name", "description", "axes"})
    axes = {name: list(values) for name, values in results.study.axes}
    lrs = sorted(results.study.axis("lr"))
    flat = {f"axes.{name}": ", ".join(map(str, values)) for name, values in axes.items()}
    flat["axes.lr"] = f"{len(lrs)} from {lr_text(lrs[0])} to {lr_text(lrs[-1])}"
    flat |= _flat(study)
    if "checksum" in results.manifest:
        flat["data"] = str(results.manifest["checksum"])[:12]
    return flat


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(item)
    return flat


def _rows(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a (depth, arm) that any study has, with each study's numbers as text."""
    arms = [{(a["depth"], a["arm"]): a for a in each["arms"]} for each in summaries]
    keys = {key for each in arms for key in each}
    order = arm_order(arm for _, arm in keys)
    rows = []
    for depth, arm in sorted(keys, key=lambda key: (key[0], order.index(key[1]))):
        found = [each.get((depth, arm)) for each in arms]
        rows.append(
            {
                "depth": depth,
                "arm": arm,
                "edges": [_edge(a) for a in found],
                "sensitivities": [_sensitivity(a) for a in found],
                "losses": [_loss(a) for a in found],
            }
        )
    return rows


def _edge(arm: dict[str, Any] | None) -> str:
    if arm is None:
        return "–"
    edge = arm["max_stable_lr"]
    return f"{edge_text(edge)} {interval_text(edge['low'], edge['high'], '.3g')}".strip()


def _sensitivity(arm: dict[str, Any] | None) -> str:
    if arm is None or arm["lr_sensitivity"]["value"] is None:
        return "–"
    value = arm["lr_sensitivity"]
    return f"{value['value']:.2f} {interval_text(value['low'], value['high'])}".strip()


def _loss(arm: dict[str, Any] | None) -> str:
    return "–" if arm is None or arm["best_loss"] is None else f"{arm['best_loss']:.3f}"
