"""The long form: `make test-faults [SEED=1] [FAULTS=100] [SCENARIO=7]`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.faults.beside import another_ray
from tests.faults.study import REPORT_EVERY, Place, Tables
from tests.faults.suite import Outcome, can_mount, place_for, play, scenarios, undisturbed


def main() -> None:
    """Plays the scenarios, prints what came of them, and exits with 1 if any failed."""
    parser = argparse.ArgumentParser(description="Faults at random moments, in real processes.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=140)
    parser.add_argument("--scenario", type=int, help="play this one only")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    # What is ignored here, as under nohup, the sweeps would ignore too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Ended from outside, too, it leaves no process stopped and no disk mounted.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    disk = can_mount()
    if not disk:
        print("disk full: left out, a tmpfs cannot be mounted here (root on Linux can)")
    wanted = scenarios(options.seed, options.faults, disk)
    if options.scenario is not None:
        wanted = wanted[options.scenario : options.scenario + 1]
    started = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name, another_ray() as untouched:
        place = Place(Path(name) / "runs", Path(name) / "data")
        tables = undisturbed(place)
        for scenario in wanted:
            with place_for(scenario, place.data) as here:
                outcome = play(scenario, here, tables)
            outcomes.append(outcome)
            _tell(outcome, time.monotonic() - started, options)
        other_lives = untouched()
    result = _summary(outcomes, tables, other_lives, time.monotonic() - started)
    _show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    sys.exit(not (other_lives and all(outcome.passed for outcome in outcomes)))


def _tell(outcome: Outcome, seconds: float, options: argparse.Namespace) -> None:
    verdict = "ok" if outcome.passed else f"FAILED {outcome.differences or ''}"
    print(
        f"{seconds:5.0f} s  {outcome.number:2} {verdict}: {', '.join(outcome.faults)}", flush=True
    )
    if not outcome.passed:
        again = f"SEED={options.seed} FAULTS={options.faults} SCENARIO={outcome.number}"
        print(f"{outcome.trouble}Play it again with: make test-faults {again}", flush=True)


def _summary(
    outcomes: list[Outcome], tables: Tables, other_lives: bool, seconds: float
) -> dict[str, Any]:
    """Figures of all faults, and by kind; a difference counts for every kind in its scenario."""
    counts = Counter(fault for outcome in outcomes for fault in outcome.faults)
    kinds = {}
    for kind, count in sorted(counts.items()):
        having = [outcome for outcome in outcomes if kind in outcome.faults]
        kinds[kind] = {
            "faults": count,
            **_differences(having),
            "redone": max((o.redone[kind] for o in having if kind in o.redone), default=None),
            "gone_s": max((o.gone_s[kind] for o in having if kind in o.gone_s), default=None),
        }
    return {
        "scenarios": len(outcomes),
        "failed": sum(not outcome.passed for outcome in outcomes),
        "faults": sum(counts.values()),
        "kills": sum(outcome.kills for outcome in outcomes),
        **_differences(outcomes),
        "redone": max((n for o in outcomes for n in o.redone.values()), default=None),
        "checkpoint interval": REPORT_EVERY,
        "gone_s": max((s for o in outcomes for s in o.gone_s.values()), default=None),
        "rows of a study": len(tables.history),
        "other Ray session untouched": other_lives,
        "seconds": round(seconds),
        "kinds": kinds,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def _differences(outcomes: list[Outcome]) -> dict[str, int]:
    names = ("lost rows", "doubled rows", "differing values")
    return {name: sum(o.differences.get(name, 0) for o in outcomes) for name in names}


def _show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['scenarios']} studies, {result['failed']} failed")
    heads = ("fault", "faults", "lost rows", "doubled", "differing", "steps redone", "s until gone")
    for head in heads:
        table.add_column(head, justify="left" if head == "fault" else "right")
    total = f"all ({result['kills']} kills)"
    for kind, row in [*result["kinds"].items(), (total, result)]:
        gone = "" if row["gone_s"] is None else f"{row['gone_s']:.1f}"
        cells = [row[n] for n in ("faults", "lost rows", "doubled rows", "differing values")]
        cells.append("" if row["redone"] is None else row["redone"])
        table.add_row(kind, *map(str, cells), gone)
    Console(width=110).print(table)
    print(
        f"One checkpoint interval is {result['checkpoint interval']} steps. Another Ray session on "
        f"the machine: {'untouched' if result['other Ray session untouched'] else 'HARMED'}. "
        f"{result['seconds'] / 60:.0f} min."
    )


if __name__ == "__main__":
    main()
