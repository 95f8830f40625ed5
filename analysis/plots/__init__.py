"""Altair charts of a study: tables in, charts out. No statistic is computed here.

Every function takes tidy tables (see `analysis.tables` and `analysis.estimators`) and a
`Layout`, and returns an Altair chart that draws without a network.
"""

from analysis.plots.curves import training_curves
from analysis.plots.depth import lr_sensitivity, max_stable_lr, necessity
from analysis.plots.loss import lr_loss
from analysis.plots.metrics import metric
from analysis.plots.phase import phase_map
from analysis.plots.robustness import robustness
from analysis.plots.stabilisers import arm_changes, arm_curves, arm_phases, crossed
from analysis.plots.steps import steps_to_loss
from analysis.plots.theme import COLUMN, WIDE, Layout
from analysis.plots.warning import early_warning

__all__ = [
    "COLUMN",
    "WIDE",
    "Layout",
    "arm_changes",
    "arm_curves",
    "arm_phases",
    "crossed",
    "early_warning",
    "lr_loss",
    "lr_sensitivity",
    "max_stable_lr",
    "metric",
    "necessity",
    "phase_map",
    "robustness",
    "steps_to_loss",
    "training_curves",
]
