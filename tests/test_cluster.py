"""A Ray cluster as the engine: two nodes on this machine, one of which is lost."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError

import search_spaces
from analysis import load
from tests.faults.study import ROOT, wait_for
from tests.two_nodes import lose, two_nodes
from tune_study.concurrency import Node, Share, policy_on
from tune_study.config import ConfigError
from tune_study.data import open_tokens, prepare
from tune_study.losses import Losses
from tune_study.search.ends import End
from tune_study.searcher import CellSearcher
from tune_study.trainer import Trainer

FOUR = [
    *("smoke", "--name", "tiny", "--no-report", "--lr", "1e-2,1e-1", "--depth", "1"),
    *("--seed", "0", "--set", "steps=200", "--set", "warmup_steps=10", "--checkpoint-every", "0"),
]
"""Four cells of 20 reports, with a checkpoint at each."""


def test_a_node_is_lost_and_nothing_with_it(data, tmp_path):
    prepare(search_spaces.get("smoke").base.data, data, say=lambda line: None)
    study = tmp_path / "runs" / "tiny"
    place = ["--data", str(data), "--runs"]
    token = {"RAY_AUTH_TOKEN": "another", "RAY_AUTH_TOKEN_PATH": ""}
    with two_nodes(hidden=tmp_path.parent.parent) as nodes:
        stranger = nodes.start(*FOUR, *place, str(tmp_path / "other"), **token)
        sweep = nodes.start(*FOUR, *place, str(study.parent))
        wait_for(lambda: half_way(study) == 2 or sweep.poll() is not None)
        lose(nodes.second)
        output, errors = sweep.communicate(timeout=240)
        _, refusal = stranger.communicate(timeout=60)
    assert sweep.returncode == 0, output + errors
    assert "2 nodes, 1 core each" in output
    assert output.count("its node is gone") == 1
    results = load(study)
    assert results.damage == ()
    assert set(results.cells["state"]) <= {"stable", "failed"}
    (resumed,) = {step for step in results.history["resumed_step"] if step}
    assert resumed >= 20  # of 3 reports or more, all but the last had a checkpoint
    tokens = open_tokens(results.study.base.data, data)
    for config in results.study.cells():
        trainer = Trainer(config, tokens)
        alone = [trainer.train(config.report_every) for _ in range(20)]
        swept = results.history[results.history["cell"] == config.label]
        for metric in ("val/loss", "train/loss", "grad/norm", "attn/max_logit"):
            assert swept[metric].tolist() == [row[metric] for row in alone]
    assert stranger.returncode == 2
    (line,) = refusal.splitlines()
    assert "RAY_AUTH_TOKEN_PATH" in line
    assert not (tmp_path / "other").exists()


def half_way(study):
    """Cells that have some reports and are far from their end."""
    found = study.glob("tune/*/*/result.json")
    return sum(3 <= path.read_bytes().count(b"\n") < 14 for path in found)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray://head:10001", "is not the address of a head"),
        ("127.0.0.1:1", "no Ray cluster to run on"),
        ("nowhere", "no Ray cluster to run on"),
    ],
)
def test_no_cluster_is_one_line_and_exit_code_2(run, tmp_path, address, said):
    refused = run(tmp_path, "sweep", *FOUR, "--address", address)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"--address {address}: {said}")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- policy


def test_a_cluster_has_room_for_what_fits_on_its_nodes(small):
    nodes = [Node(5), Node(2), Node(1, gpus=2)]
    two = small.replace(threads=2)
    assert policy_on(nodes, two).at_once == 2 + 1 + 0
    assert policy_on(nodes, two).limit is False  # a node may be added
    asked = policy_on(nodes, two, asked=9)
    assert (asked.at_once, asked.limit) == (9, True)
    gpu = policy_on(nodes, small.replace(device="cuda"))
    assert (gpu.at_once, gpu.cpus, gpu.gpus) == (1, 1, 1.0)  # one core for two GPUs
    shared = policy_on([Node(8, gpus=2)], small.replace(device="cuda"), asked=5)
    assert (shared.at_once, shared.gpus) == (5, 1 / 3)
    assert Node(8, gpus=2).cells(1, shared.gpus) == 6


def test_a_share_of_gpus_holds_on_a_cluster_and_is_told(small):
    nodes = [Node(8, 2, "H100"), Node(8, 2, "H100")]
    share = Share(cells=4, gain=2.9, told="2.9 x")
    found = policy_on(nodes, small.replace(device="cuda"), share=share)
    assert (found.at_once, found.gpus, found.speed) == (16, 0.25, 2.9 / 4)
    assert found.why == "2 nodes, 4 GPUs, 4 cells on each: 2.9 x"
    asked = policy_on(nodes, small.replace(device="cuda"), 4, share)
    assert (asked.gpus, asked.speed) == (1, 1)


ON_GPU = """
import sys
from functools import partial
import ray
from tune_study import sharing, sweep
from tune_study.cluster import Cluster
from tune_study.config import TrialConfig

ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
cluster, cell = Cluster("", ""), TrialConfig.model_validate_json(sys.argv[1])
assert cluster.nodes()[0].gpus == 1
print(cluster.on_gpu(partial(sharing.on_this_machine, cell, 300, 2, 0.1), 2))
try:
    cluster.on_gpu(partial(int, "no number"), 1)
except RuntimeError as error:
    print(error)
"""


def test_a_node_with_a_gpu_measures(small):
    command = [sys.executable, "-c", ON_GPU, small.model_dump_json()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    tried, error = done.stdout.splitlines()
    assert tried.startswith("Tried(most=2, rates=(")
    assert tried.count(".") >= 2
    assert "invalid literal for int()" in error


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"threads": 6}, "no node of the cluster has 6 cores for a cell"),
        ({"device": "mps"}, "is not for a Ray cluster"),
        ({"device": "cuda"}, "1 core and 1 GPU"),
    ],
)
def test_what_fits_on_no_node_is_refused(small, changes, said):
    with pytest.raises(ConfigError, match=said):
        policy_on([Node(5), Node(2)], small.replace(**changes))


# ---------------------------------------------------------------------- losses


@pytest.fixture
def fail(tmp_path):
    """Tells `losses` that a trial failed at a step; returns whether its cell counts as lost."""

    def call(losses, error, step):
        kept = tmp_path / "error.pkl"
        kept.write_bytes(pickle.dumps(error))
        cell = {"label": "d1", "last_step": 0}
        trial = SimpleNamespace(
            pickled_error_file=str(kept), config={"cell": cell}, last_result={"step": step}
        )
        losses.labels.clear()
        losses.on_trial_error(None, trial)
        return losses.labels == {"d1"}

    return call


GONE = ActorUnavailableError("socket closed", b"0" * 16)


def test_a_cell_that_takes_its_process_along_again_and_again_has_an_error(fail):
    losses = Losses(count=True)
    assert [fail(losses, GONE, step) for step in (10, 10, 10, 10)] == [True, True, True, False]
    assert fail(losses, GONE, 20)  # it has come further


def test_what_the_cell_raises_itself_is_no_loss(fail):
    assert not fail(Losses(count=True), ValueError("shapes differ"), 10)
    assert not fail(Losses(count=False), GONE, 10)  # without a cluster


def test_a_search_does_not_decide_without_a_cell_that_was_lost():
    told = []
    course = SimpleNamespace(due=["a", "b"], batches=[[]], tell=lambda *end: told.append(end))
    searcher = CellSearcher(course, lambda place: {"label": place}, None, list, lost={"a"})
    searcher.suggest("1")
    searcher.suggest("2")
    searcher.on_trial_complete("1", error=True)
    assert told == []
    searcher.on_trial_complete("2", error=True)
    assert told == [("b", End(lost=True))]
