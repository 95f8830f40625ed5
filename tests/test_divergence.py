"""Hand-made histories whose verdict is known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tune_study.config import CRITERIA, Criterion
from tune_study.divergence import Finish, diverged, failed, normalised_loss, ordered
from tune_study.stopper import DivergenceStopper

SAFE = Criterion()
WARMUP = 40
H1, INIT = 4.9, 6.2


def report(step, loss=3.0, ema=None, logit=5.0, nonfinite_step=None):
    return {
        "step": step,
        "val/loss": loss,
        "val/loss_init": INIT,
        "train/loss_ema": loss if ema is None else ema,
        "attn/max_logit": logit,
        "data/unigram_entropy": H1,
        "nonfinite_step": nonfinite_step,
    }


def history(losses, **changes):
    return [report(20 * (i + 1), loss, **changes) for i, loss in enumerate(losses)]


def verdict(rows):
    return diverged(rows, SAFE, WARMUP)


def test_a_healthy_run_has_no_verdict():
    assert verdict(history([5.5, 4.0, 3.0, 2.0, 1.0])) is None


def test_a_spike_that_recovers_is_not_divergence():
    assert verdict(history([5.0, 4.0, 9.0, 3.0, 2.0])) is None  # one report, patience is 2


def test_warm_up_may_spike():
    assert verdict(history([9.0, 9.0, 5.0, 4.0])) is None  # steps 20 and 40 are warm-up


def test_loss_above_init_that_stays():
    result = verdict(history([5.0, 4.0, 6.5, 6.6, 6.4]))
    assert (result.state, result.step) == ("diverged", 80)  # second bad report
    assert "6.6" in result.reason
    assert "6.2" in result.reason


def test_a_climb_to_the_unigram_plateau_is_caught_by_its_logits():
    rows = history([4.0, 3.0, 4.8, 4.9, 4.9])
    assert verdict(rows) is None  # never above the loss at init
    for row in rows[2:]:
        row["attn/max_logit"] = 5e4
    assert verdict(rows).step == 80
    assert "5e+04" in verdict(rows).reason


def test_a_large_logit_counts_only_at_the_plateau_where_the_rule_says_so():
    at_plateau = SAFE.replace(max_logit=1000.0, plateau=0.9)  # 0.9 x 4.9 = 4.41
    learning = history([5.0, 4.9, 4.4, 4.3, 3.0], logit=2000.0)
    assert diverged(learning, at_plateau, WARMUP) is None
    assert diverged(learning, at_plateau.replace(plateau=None), WARMUP).step == 80
    stuck = history([5.0, 4.9, 4.5, 4.5, 4.5], logit=2000.0)
    assert diverged(stuck, at_plateau, WARMUP).step == 80
    slow = history([5.9, 5.8, 5.7, 5.6, 5.5])  # a low learning rate: above H1, small logits
    assert diverged(slow, at_plateau, WARMUP) is None


def test_a_blow_up_and_then_a_finite_plateau():
    rows = history([4.0, 3.0, 40.0, 12.0, 4.9])
    assert verdict(rows).step == 80  # above the loss at init twice; what follows is late
    one = history([4.0, 3.0, 40.0, 4.9, 4.9])
    assert verdict(one) is None  # a plateau below the loss at init, small logits: left to `failed`


def test_reports_twice_as_often_move_the_verdict_by_less_than_two_reports():
    losses = [5.0, 4.0, 3.0, 4.0, 6.3, 6.4, 6.5, 6.4, 6.4, 6.4]
    often = [report(10 * (i + 1), loss) for i, loss in enumerate([5.5, *losses])]
    seldom = [row for row in often if row["step"] % 20 == 0]
    assert (verdict(often).step, verdict(seldom).step) == (70, 80)


def test_noise_of_the_validation_loss_is_nothing():
    assert verdict(history([4.0, 3.0, 3.4, 2.9, 3.3, 2.8, 3.2])) is None


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([1.0, 4.0, 4.9, 7.0, None]), min_size=1, max_size=12))
def test_off_says_only_what_is_not_finite(losses):
    rows = history(losses, logit=1e6)
    result = diverged(rows, CRITERIA["off"], WARMUP)
    assert (result is None) == (None not in losses)


def test_non_finite_is_caught_on_its_step_even_in_warm_up():
    rows = [*history([5.0]), report(40, None, nonfinite_step=23)]
    assert (verdict(rows).state, verdict(rows).step) == ("diverged", 23)


def test_a_validation_loss_alone_that_is_not_finite():
    rows = history([5.0, 4.0])
    rows[1]["val/loss"] = None
    assert verdict(rows).step == 40


def test_all_rows_non_finite():
    rows = [report(20 * i, None, nonfinite_step=1) for i in (1, 2, 3)]
    assert verdict(rows).step == 1


def test_one_report_only_and_none():
    assert verdict(history([5.0])) is None
    assert verdict([]) is None


def test_rules_can_be_switched_off():
    rows = history([4.0, 3.0, 7.0, 7.0], logit=1e6)
    quiet = Criterion(loss_above_init=False, max_logit=None)
    assert diverged(rows, quiet, WARMUP) is None
    assert "logit" in diverged(rows, Criterion(loss_above_init=False), WARMUP).reason


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.sampled_from([1.0, 4.0, 7.0, None]), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_order_and_replay_change_nothing(losses, random):
    rows = history(losses)
    for row in rows:
        if row["val/loss"] is None:
            row["train/loss_ema"] = None
    again = rows + random.sample(rows, len(rows) // 2)
    random.shuffle(again)
    assert verdict(again) == verdict(rows)


def test_a_later_report_of_a_step_replaces_the_earlier():
    assert ordered([report(20, 9.0), report(40), report(20, 1.0)])[0]["val/loss"] == 1.0


def fed(stopper, rows, trial="t"):
    """Steps at which the stopper says stop."""
    return [row["step"] for row in rows if stopper(trial, {**row, "cell": "c"})]


def test_stopper_stops_where_the_verdict_falls_and_writes_it_down():
    rows = history([5.0, 4.0, 6.5, 6.6])
    stopper = DivergenceStopper(SAFE, WARMUP)
    last = dict(rows[3])
    assert fed(stopper, rows[:3]) == []
    assert stopper("t", last | {"cell": "c"}) is True
    last["cell"] = "c"
    stopper("t", last)
    assert last["verdict/state"] == "diverged"
    assert last["verdict/step"] == 80
    assert "loss at init" in last["verdict/reason"]


def test_stopper_after_a_resume_decides_as_if_never_stopped():
    rows = history([5.0, 4.0, 6.5, 6.6])
    straight = fed(DivergenceStopper(SAFE, WARMUP), rows)
    # cut off after the first bad report; resumed from the checkpoint before it, or right after
    for known, again in ((rows[:2], rows[2:]), (rows[:3], rows[3:]), (rows[:3], rows[2:])):
        resumed = DivergenceStopper(SAFE, WARMUP, earlier={"c": known})
        assert fed(resumed, again) == straight == [80]


def test_stopper_keeps_cells_apart():
    stopper = DivergenceStopper(SAFE, {"a": WARMUP, "b": WARMUP})
    bad = history([5.0, 4.0, 6.5, 6.6])
    for row_a, row_b in zip(bad, history([5.0, 4.0, 3.0, 2.0]), strict=True):
        stopped_a = stopper("1", {**row_a, "cell": "a"})
        assert not stopper("2", {**row_b, "cell": "b"})
    assert stopped_a


def test_stopper_with_stopping_off_never_stops():
    rows = history([9.0] * 6, logit=1e9)
    assert fed(DivergenceStopper(Criterion(stop=False), WARMUP), rows) == []


def test_halt_ends_the_sweep():
    stopper = DivergenceStopper(SAFE, WARMUP)
    assert not stopper.stop_all()
    stopper.halt()
    assert stopper.stop_all()


# ------------------------------------------------------------ failed


def states(*cells):
    return [v.state for v in failed([Finish(*cell) for cell in cells], H1, SAFE)]


def test_failed_is_a_high_loss_above_the_best_learning_rate_only():
    # (4.7 - 0.9) / (4.9 - 0.9) = 0.95; 5.6 is worse still but merely slow
    assert states((1e-4, "off", 5.6), (1e-2, "off", 0.9), (1.0, "off", 4.7)) == [
        "stable",
        "stable",
        "failed",
    ]


def test_failed_margin_by_hand():
    # margin 0.5 of 0.9 .. 4.9 lies at 2.9
    assert states((1e-2, "off", 0.9), (0.1, "off", 2.89), (0.2, "off", 2.91)) == [
        "stable",
        "stable",
        "failed",
    ]


def test_an_arm_that_fails_everywhere_is_measured_against_the_other():
    assert states((0.1, "off", 4.6), (0.3, "off", 4.8), (0.1, "rmsnorm", 1.0)) == [
        "failed",
        "failed",
        "stable",
    ]


def test_where_nothing_learned_nothing_is_called_failed():
    assert states((1e-4, "off", 4.8), (1e-3, "off", 4.85)) == ["stable", "stable"]


def test_no_cells_no_verdicts():
    assert failed([], H1, SAFE) == []


@pytest.mark.parametrize(("loss", "share"), [(0.9, 0.0), (4.9, 1.0), (2.9, 0.5)])
def test_normalised_loss(loss, share):
    assert normalised_loss(loss, 0.9, 4.9) == pytest.approx(share)
