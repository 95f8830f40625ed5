"""The search: beliefs worked by hand, the same cells however it is cut, error rates, a study."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest

from analysis import estimators, hypotheses, load
from analysis.report import write
from analysis.summary import summarise
from benchmarks import edge as replayed
from benchmarks import edge_simulated as simulated
from tests import fabricated
from tune_study import configs, sweep
from tune_study.config import (
    ConfigError,
    Criterion,
    DataConfig,
    Search,
    Study,
    TrialConfig,
    log_grid,
)
from tune_study.identity import identity
from tune_study.search import best, edge
from tune_study.search.cells import Lattice
from tune_study.search.course import Course
from tune_study.search.ends import End, Line
from tune_study.search.rounds import Rounds
from tune_study.store import StudyFolder


def test_belief_by_hand():
    # Edges 0, 1, 2; place 0 is stable: right for edges 1 and 2, wrong for edge 0.
    even = edge.prior(2)
    assert edge.belief({0: True}, even, 0.1) == pytest.approx([0.1 / 1.9, 0.9 / 1.9, 0.9 / 1.9])
    # Place 1 unstable as well: 0.1 x 0.9, 0.9 x 0.9, 0.9 x 0.1.
    both = edge.belief({0: True, 1: False}, even, 0.1)
    assert both == pytest.approx([0.09 / 0.99, 0.81 / 0.99, 0.09 / 0.99])
    assert edge.within_one(both) == (1, pytest.approx(1))


def test_prior_has_a_floor_and_a_peak_at_the_median_of_the_others():
    before = edge.prior(24, [10, 11, 20], spread=2.0)
    assert before.sum() == pytest.approx(1)
    assert before.argmax() == 11
    assert before[24] > edge.FLOOR / 25


def test_first_place_is_the_middle_and_the_bracket_is_closed():
    before = edge.prior(25)
    assert edge.next_place({}, before, 0.05, 0.9) == 12
    # Sure to within one, but 14 has not run: it is asked for.
    sure = {12: True, 13: True, 15: False, 16: False}
    assert edge.next_place(sure, before, 0.05, 0.5) == 14
    # With 14 stable the edge stands on three; asked to stand on four it needs 11, too.
    stands = sure | {14: True}
    assert edge.next_place(stands, before, 0.05, 0.5, beneath=3) is None
    assert edge.next_place(stands, before, 0.05, 0.5, beneath=4) == 11
    assert edge.bracket({3: True, 5: False, 7: True}, 25) == (3, 5)
    assert edge.bracket({}, 25) == (-1, 25)


def test_an_edge_stands_on_one_sound_cell_or_on_three():
    before, error = edge.prior(25), 0.05
    closed = {14: True, 15: False}
    # 14 is far from failure: nothing below it is asked for.
    assert edge.next_place(closed, before, error, 0.1, beneath=3, sound={14}) is None
    # It is not: 13, which is, ends it; else 12 as well.
    assert edge.next_place(closed, before, error, 0.1, beneath=3) == 13
    stands = closed | {13: True}
    assert edge.next_place(stands, before, error, 0.1, beneath=3, sound={13}) is None
    assert edge.next_place(stands, before, error, 0.1, beneath=3) == 12
    # A cell near failure below a sound one: the cells between are asked for.
    between = closed | {12: True}
    assert edge.next_place(between, before, error, 0.1, beneath=3, sound={14}) == 13


def test_nothing_is_run_above_an_unstable_cell_that_is_believed():
    # Even belief, 16 unstable: edges above 17 have 0.05 each against 0.95 for the others.
    even = edge.prior(25)
    assert edge.next_place({16: False}, even, 0.05, 0.8) < 16
    # Others' edges at 22 speak against it, and a cell above is run.
    far = edge.prior(25, [22, 22, 22], spread=1.0)
    assert edge.next_place({16: False, 15: True}, far, 0.05, 0.8) > 16


def test_a_verdict_that_is_sure_already_is_not_asked_for():
    # 13 unstable below two stable ones: whether the edge is 13 or 16 nothing further tells.
    near = edge.prior(25, [13, 13], spread=1.5)
    stable = {12: True, 13: False, 14: True, 15: True, 16: False, 17: False}
    assert edge.within_one(edge.belief(stable, near, 0.05))[1] < 0.8
    assert edge.next_place(stable, near, 0.05, 0.8, sound={12}) is None


@pytest.mark.parametrize("truth", range(26))
def test_every_edge_is_found_where_no_verdict_is_wrong(truth):
    stable = simulated.one_line(lambda place: place < truth, 25)
    assert edge.bracket(stable, 25) == (truth - 1, truth)
    assert len(stable) <= 8


def test_a_cell_without_a_result_is_passed_over():
    before, stable = edge.prior(9), {3: True, 5: False}
    assert edge.next_place(stable, before, 0.05, 0.1, tried={4}) is None
    assert edge.next_place(stable, before, 0.05, 0.1) == 4


def test_lowest_loss_by_shrinking_steps():
    curve = [(place - 7) ** 2 for place in range(25)]
    losses = {12: curve[12]}
    asked = []

    def following():
        return best.next_place(losses, dict.fromkeys(losses, True), 25, (4, 2, 1))

    while (place := following()) is not None:
        asked.append(place)
        losses[place] = curve[place]
    # From 12 to 8, to 6; then 5 and 7 enclose 6, and 7 has its neighbours.
    assert asked == [8, 4, 6, 5, 7]
    # Nothing above an unstable cell is run for it.
    assert best.next_place({4: 1.0}, {4: True, 6: False}, 25, (4,)) == 0


def rounds(ends, **rules):
    lines = list(dict.fromkeys(line for line, _ in ends))
    return Rounds(lines, simulated.LRS, Search(**rules), Criterion())


def test_the_order_of_ends_and_cuts_change_nothing():
    _, ends = simulated.study(np.random.default_rng(1), 0.05)
    straight = Course(rounds(ends), ends.get).asked
    for seed in range(3):
        rng, done = random.Random(seed), {}
        while True:  # each time round is a start of the study, cut off somewhere
            course = Course(rounds(ends), done.get)
            if not course.due:
                break
            for _ in range(rng.randrange(1, 40)):
                if course.due:
                    cell = rng.choice(course.due)
                    done[cell] = ends[cell]
                    course.tell(cell, ends[cell])
        assert course.asked == straight
        assert set(done) == set(straight)


def test_a_smaller_budget_is_the_beginning_of_a_larger_one():
    _, ends = simulated.study(np.random.default_rng(2), 0.0)
    whole = Course(rounds(ends), ends.get).asked
    for cells in (1, 17, 60):
        assert Course(rounds(ends), ends.get, cells).asked == whole[:cells]


def test_cells_that_are_lost_hold_up_no_line():
    _, ends = simulated.study(np.random.default_rng(3), 0.0)
    middle = {cell for cell in ends if cell[1] == 12}
    course = Course(rounds(ends), lambda cell: End(lost=True) if cell in middle else ends[cell])
    assert not course.due
    assert all(line.decided for line in course.edges())


def test_error_rates_where_verdicts_are_wrong():
    """Lines more than one learning rate off; docs/edge.md has the rates over many studies."""
    for wrong, limit in ((0.0, 0.0), (0.02, 0.06), (0.05, 0.1)):
        rng = np.random.default_rng(7)
        missed, cells = [], []
        for _ in range(8):
            truth, ends = simulated.study(rng, wrong)
            tried = simulated.by_line(simulated.search(ends).ends)
            missed += [simulated.missed(tried[line], at, wrong) for line, at in truth.items()]
            cells += [len(tried[line]) for line in truth]
        assert np.mean(missed) <= limit
        assert np.mean(cells) <= 6.25


def test_a_line_that_has_learned_nothing_does_not_pass_for_slow():
    lrs = simulated.LRS
    ends = {(Line(1, "off", 0), 12): End(0.9, 4.9), (Line(1, "on", 0), 12): End(4.85, 4.9)}
    of_two = Rounds(list(dict.fromkeys(at for at, _ in ends)), lrs, Search(), Criterion())
    low, high = next((e.low, e.high) for e in of_two.edges(ends) if e.line.arm == "on")
    assert (low, high) == (-1, 12)


def test_a_group_is_judged_by_what_others_reached_until_it_has_its_own():
    lines = [Line(1, arm, seed) for seed in (0, 1) for arm in ("off", "on")]
    of_all = Rounds(lines, simulated.LRS, Search(best_lr=False), Criterion())
    # The first seed reached 0.9 at place 12. In the second all cells lie near the edge, and its
    # lowest loss is 2.5: by that 3.2 is stable, 0.29 of the way to 4.9; by 0.9 it failed, 0.575.
    ends = {(lines[0], place): End(loss, 4.9) for place, loss in ((8, 1.1), (12, 0.9), (16, 2.0))}
    ends |= {(lines[2], place): End(loss, 4.9) for place, loss in ((14, 2.5), (15, 3.2))}
    known = of_all.known(ends)
    assert known.stable[lines[2]] == {14: True, 15: False}
    assert known.contested == {(1, 1)}
    assert of_all.reference(known, (1, 1)) == (lines[2], 12)
    # Its own 12 spiked; then it looks further for a lowest loss of its own.
    known = of_all.known(ends | {(lines[2], 12): End(2.3, 4.9)})
    assert known.stable[lines[2]][15] is False
    assert of_all.reference(known, (1, 1)) == (lines[2], 8)
    # With one, the two agree and nothing is contested.
    assert not of_all.known(ends | {(lines[2], 12): End(0.95, 4.9)}).contested
    # Where that is all it can reach, it is judged by its own, as in the tables.
    around = {(lines[2], place): End(loss, 4.9) for place, loss in ((12, 2.3), (8, 2.4))}
    known = of_all.known(ends | around)
    assert of_all.reference(known, (1, 1)) is None
    assert known.stable[lines[2]][15] is True


def test_learning_rates_for_all_lines_are_the_first_round():
    _, ends = simulated.study(np.random.default_rng(4), 0.0)
    lines = list(dict.fromkeys(line for line, _ in ends))
    course = Course(
        Rounds(lines, simulated.LRS, Search(best_lr=False, every=6), Criterion()), ends.get
    )
    shared = {(line, place) for line in lines for place in (0, 6, 12, 18, 24)}
    assert set(course.batches[0]) == shared
    assert all(len(batch) <= 12 for batch in course.batches[1:])
    assert all(edge.decided and edge.high - edge.low == 1 for edge in course.edges())
    # A sixth of the lattice leaves brackets of 6 steps; whoever asks for nothing shared runs fewer.
    assert len(shared) < len(course.ends) < 0.5 * len(ends)
    with pytest.raises(ConfigError, match="every = 7: does not divide the 24 steps of the axis lr"):
        STUDY.replace(search=Search(every=7))


def test_near_offs_edge_the_other_arms_run_the_same_cells():
    _, ends = simulated.study(np.random.default_rng(4), 0.0)
    lines = list(dict.fromkeys(line for line, _ in ends))
    rules = Search(best_lr=False, every=6, threshold=True)
    course = Course(Rounds(lines, simulated.LRS, rules, Criterion()), ends.get)
    plain = rules.replace(threshold=False)
    without = Course(Rounds(lines, simulated.LRS, plain, Criterion()), ends.get)
    assert len(without.asked) < len(course.asked)
    shared = 0
    ran = set(course.asked)
    for found in course.edges():
        if found.line.arm == "off":
            on = Line(found.line.depth, "rmsnorm", found.line.seed)
            near = {p for at, p in ran if at == found.line and found.high - 4 <= p <= found.high}
            assert near <= {p for at, p in ran if at == on}
            shared += len(near)
    assert shared > 30  # of 15 edges, each with at least the cells on its two sides


# --------------------------------------------------------------------------- a study

STUDY = Study(
    name="searched",
    base=TrialConfig(device="cpu", steps=40, warmup_steps=4, report_every=40, data=DataConfig()),
    axes={
        "lr": log_grid(1e-3, 1, per_decade=8),
        "depth": (1, 2),
        "qk_norm": ("off", "rmsnorm"),
        "seed": (0, 1),
    },
    search=Search(),
)
MANIFEST = {"checksum": "abc", "unigram_entropy": 4.88, "loss_floor": 0.5, "bytes_per_token": 2.0}


def run_plainly(runs, study=STUDY, most=1000):
    """Runs the study as sweeps do, on made-up cells: the folder, and the cells run, in order."""
    folder = StudyFolder(runs, study.name)
    folder.write(study, MANIFEST)
    made = fabricated.results(STUDY).cells.set_index("cell")
    ran = []
    while (plan := sweep.plan(study, folder, "abc")).todo:
        for cell in plan.todo:
            if len(ran) == most:
                return folder, ran
            trial = folder.experiments / "sweep-001" / cell.label
            trial.mkdir(parents=True)
            names = {"label": cell.label, "identity": identity(cell.config, "abc")}
            (trial / "params.json").write_text(json.dumps({"cell": names}))
            row = made.loc[cell.label]
            loss = {"train/loss_ema": row.loss, "val/loss": row.loss, "val/loss_min": row.loss}
            report = {
                "step": 40,
                "val/loss_init": row.loss_init,
                "attn/entropy": 1.0,
                "attn/max_logit": row.max_logit,
                "data/unigram_entropy": 4.88,
                "act/kurtosis": 3.0,
                "grad/norm": 0.5,
                "grad/clipped_steps": 0,
                "train/losses": [row.loss],
                "nonfinite_step": None,
                "nonfinite": "",
                "resumed_step": 0,
                "params": 7,
                "device": "cpu (test)",
                "time/train_s": 1.0,
            }
            (trial / "result.json").write_text(json.dumps(report | loss) + "\n")
            ran.append(cell.label)
    return folder, ran


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    return run_plainly(tmp_path_factory.mktemp("runs"))


def test_a_search_that_was_cut_off_runs_the_same_cells(searched, tmp_path):
    _, straight = searched
    folder, first = run_plainly(tmp_path, most=31)
    shutil.rmtree(folder.experiments / "sweep-001" / first[-1])  # it had not reported when killed
    _, rest = run_plainly(tmp_path)
    assert sorted([*first[:-1], *rest]) == sorted(straight)
    assert len(straight) < 0.4 * len(STUDY)


def test_a_finished_search_has_a_table_and_a_report(searched, tmp_path):
    folder, ran = searched
    results = load(folder.path)
    states = results.cells["state"].value_counts()
    assert len(results.cells) == len(STUDY) == 200
    assert states["untried"] == 200 - len(ran)
    assert "missing" not in states
    summary = summarise(results)
    assert summary["complete"]
    assert summary["search"]["cells"] == summary["cells"]["found"] == len(ran)
    assert summary["search"]["decided"] == summary["search"]["lines"] == 8
    for arm in summary["arms"]:
        assert arm["lr_sensitivity"]["value"] is None
        assert "untried of 25 cells" in arm["lr_sensitivity"]["reason"]
        assert arm["max_stable_lr"]["value"]
        assert arm["best_lr"]
    drops = [p for v in summary["verdicts"] for p in v["parts"] if "sensitivity" in p["name"]]
    assert drops
    assert all(part["note"].startswith("a search left") for part in drops)
    page = write(results, tmp_path).read_text()
    assert f"A search asked for {len(ran)} of the 200 cells" in page
    assert "Compare a search with a search." in page


def test_lr_sensitivity_of_a_search_rests_on_what_all_lines_ran(tmp_path):
    study = STUDY.replace(search=Search(best_lr=False, every=4))
    folder, ran = run_plainly(tmp_path, study)
    results = load(folder.path)
    assert (results.cells["state"] == "untried").sum() == 200 - len(ran) > 0
    part = results.cells[results.cells["lr"].isin(STUDY.axis("lr")[::4])]
    assert "untried" not in set(part["state"])
    mine, theirs = (estimators.lr_sensitivity(cells) for cells in (results.cells, part))
    assert mine["value"].tolist() == pytest.approx(theirs["value"].tolist())
    assert set(mine["n_lrs"]) == {7}
    verdicts = {v.hypothesis: v for v in hypotheses.judge(results.cells, study.margins)}
    for name in ("H1", "H2"):
        assert all(np.isfinite(part.effect) for part in verdicts[name].parts)
    text = write(results, tmp_path / "report").read_text(encoding="utf-8")
    assert "rest on the 7 evenly spaced learning rates" in text


def test_a_cut_search_says_what_is_missing(tmp_path):
    folder, _ = run_plainly(tmp_path, most=30)
    summary = summarise(load(folder.path))
    assert not summary["complete"]
    assert summary["cells"]["missing"] > 0


def test_a_search_is_topped_up_to_the_grid_and_back(searched, tmp_path):
    folder, ran = searched
    grid = STUDY.replace(search=None)
    folder.refuse_if_different(grid, "abc")
    plan = sweep.plan(grid, folder, "abc")
    assert plan.done == len(ran)
    assert plan.done + len(plan.todo) == 200
    # A grid's cells are the search's without running any.
    shutil.copytree(folder.path, tmp_path / STUDY.name)
    run_plainly(tmp_path, grid)
    again = sweep.plan(STUDY, StudyFolder(tmp_path, STUDY.name), "abc")
    assert again.todo == ()
    assert again.asked == len(ran)


def test_rounds_go_on_over_cells_that_are_known_already(searched, tmp_path):
    """As in a sweep that runs: one plan, all rounds, in a folder that holds half of the grid."""
    folder, ran = searched
    half = STUDY.replace(search=None, axes=dict(STUDY.axes) | {"lr": STUDY.axis("lr")[::2]})
    run_plainly(tmp_path, half)
    plan = sweep.plan(STUDY, StudyFolder(tmp_path, STUDY.name), "abc")
    lattice, course = Lattice(STUDY), plan.search
    to_run = {cell.label for cell in plan.may_run}
    known = load(folder.path).cells.set_index("cell")
    while course.due:
        cell = known.loc[lattice.configs[course.due[0]].label]
        assert cell.name in to_run
        course.tell(course.due[0], End(cell.loss, cell.unigram_entropy, cell.state == "diverged"))
    assert {lattice.configs[place].label for place in course.asked} == set(ran)


def test_a_finished_grid_is_evidence_from_the_first_round_on(tmp_path):
    edges = STUDY.replace(search=Search(best_lr=False))
    folder = StudyFolder(tmp_path, STUDY.name)
    half = STUDY.replace(search=None, axes=dict(STUDY.axes) | {"lr": STUDY.axis("lr")[::2]})
    _, by_grid = run_plainly(tmp_path, half, most=103)
    # One of its 104 cells is missing: it counts when a round asks for it, as any known cell.
    assert sweep.with_evidence(edges, folder, "abc") == edges
    by_grid += run_plainly(tmp_path, half)[1]
    informed = sweep.with_evidence(edges, folder, "abc")
    assert informed.search.given == half.axes
    course = sweep.plan(informed, folder, "abc").search
    assert len(course.given) == 104
    assert all(edge.high - edge.low <= 2 for edge in course.edges())
    # Cut off and begun again it knows the same grid, and goes on.
    _, first = run_plainly(tmp_path, informed, most=3)
    again = sweep.with_evidence(edges, folder, "abc")
    assert again == informed == configs.read(folder.path / "config.yaml", Study)
    _, rest = run_plainly(tmp_path, again)
    assert not set(by_grid) & {*first, *rest}
    # Each of the 8 lines has one place left between the grid's; a cell or two beneath it.
    assert 8 <= len(first) + len(rest) <= 16
    results = load(folder.path)
    assert results.search.ends.keys() == set(results.search.asked)
    assert len(results.search.asked) == 104 + len(first) + len(rest)
    assert all(edge.decided for edge in results.search.edges())
    # A number of cells is one of cells beyond the grid's.
    few = informed.replace(search=informed.search.replace(cells=5))
    assert len(sweep.plan(few, folder, "abc").search.asked) == 104 + 5


def test_replaying_a_grid_agrees_with_it():
    of = fabricated.study(lr=log_grid(1e-3, 1, per_decade=8))
    cells = fabricated.results(of).cells
    edges = replayed.compare(cells, Search(best_lr=False))
    both = replayed.compare(cells, Search())
    assert edges["edge"] >= 0.9
    assert edges["cells"] <= 0.27
    assert both["edge"] >= 0.9
    assert both["best"] >= 0.9
    assert both["cells"] <= 0.4
    lost = cells.assign(state=cells["state"].mask(cells["seed"] == 1, "missing"))
    assert set(replayed.whole_seeds(lost)["seed"]) == {0, 2}
    with pytest.raises(ConfigError, match="no seed has a result in every cell"):
        replayed.whole_seeds(cells.assign(state="missing"))


def test_lattice_knows_every_cell_both_ways():
    lattice = Lattice(STUDY)
    assert len(lattice.configs) == len(lattice.places) == 200
    place = lattice.places["d2-off-lr1.000e-01-s1"]
    assert place == (Line(2, "off", 1), 16)
