"""How many cells share a GPU, and which number of threads pays: decided by tables made by hand.

There is no GPU here. What measures is run for real on the CPU, with two tiny cells at once.
"""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

import search_spaces
from tune_study import cost, sharing, together
from tune_study.concurrency import Node, Share, policy
from tune_study.sharing import Tried, climb, decide, room
from tune_study.threads import Choice, advice, choices
from tune_study.together import DiedError, Together, Workers

# ------------------------------------------------------------- for real, on CPU


def test_two_processes_train_at_once_say_what_they_cannot_and_do_not_stay(small):
    before = set(psutil.Process().children())
    with Workers() as workers:
        alone = workers.measure(small, 300, count=1, seconds=0.1)
        (first,) = set(psutil.Process().children()) - before
        two = workers.measure(small, 300, count=2, seconds=0.1)
        both = set(psutil.Process().children()) - before
        with pytest.raises(DiedError, match="device = 'mps': not on this"):
            workers.measure(small.replace(device="mps"), 300, count=1, seconds=0.1)
    assert first in both  # what is warm is used again
    assert len(both) == 2
    assert min(alone.tokens_per_s, two.tokens_per_s) > 0
    assert alone.memory == two.memory == 0  # a CPU's does not bound them
    assert set(psutil.Process().children()) == before


def test_cells_are_tried_up_to_the_room_for_them(small, monkeypatch):
    monkeypatch.setattr(sharing, "GAIN", 0)  # whatever two tiny cells gain on this machine
    tried = sharing.on_this_machine(small, 300, most=2, seconds=0.1)
    assert (tried.most, len(tried.rates), tried.why) == (2, 2, "")
    assert tried.seconds > 0.2


def test_a_process_that_is_killed_is_a_number_that_does_not_fit(small):
    def measure(count):
        if count == 2:  # as the kernel does, for want of memory
            for process in psutil.Process().children():
                process.kill()
        return workers.measure(small, 300, count, 0.1)

    with Workers() as workers:
        rates, why = climb(8, measure)
    assert len(rates) == 1
    assert why == "a process ended with code -9"


def test_a_worker_ends_with_who_started_it_whatever_it_is_at(small):
    with together._started() as worker:  # ended by a kill, a start closes its end of this pipe
        for job in ({"config": small.model_dump(mode="json"), "vocab_size": 300}, {"seconds": 600}):
            together._tell(worker, job)
        assert together._answer(worker) == {}
        worker.stdin.close()
        assert worker.wait(timeout=15) == 0


# ------------------------------------------------------- cells on a GPU, by hand


@pytest.mark.parametrize(
    ("table", "most", "tried"),
    [
        ({1: 100, 2: 190, 4: 290, 8: 300}, 8, 4),  # the last doubling is tried, and does not pay
        ({1: 100, 2: 114}, 8, 2),
        ({1: 100, 2: 190, 4: 290}, 4, 3),  # no room for 8
        ({1: 100, 2: 190, 4: 290}, 7, 3),
        ({1: 100, 2: 190}, 8, 2),  # 4 end for want of memory
        ({}, 8, 0),
    ],
)
def test_doubled_as_long_as_it_pays_and_fits(table, most, tried):
    def measure(count):
        if count not in table:
            raise DiedError("CUDA out of memory")
        return Together(table[count], memory=0.01)

    rates, why = climb(most, measure)
    assert len(rates) == tried
    assert rates == list(table.values())[:tried]
    assert bool(why) == (len(table) < 2 or (max(table) == 2 and table[2] == 190))


def test_memory_bounds_them_before_they_are_tried():
    def measure(count):
        return Together(100.0 * count, memory[count])

    memory = {1: 0.22, 2: 0.44, 4: 0.95}
    rates, why = climb(8, measure)  # twice 0.44 would fit, but they took more than that
    assert (rates, why) == ([100, 200], "no memory to spare")
    memory = {1: 0.3, 2: 0.5}
    assert climb(8, measure) == ([100, 200], "no memory for twice as many")


@pytest.mark.parametrize(
    ("rates", "most", "share", "told"),
    [
        ((100, 190, 290, 300), 8, 4, "2.9 x the tokens/s of one (measured in 21 s on the largest"),
        ((100, 190, 290), 2, 2, "1.9 x the tokens/s of one (measured"),  # fewer are left to run
        ((100, 114), 8, 1, "two have 1.1 x its tokens/s (measured"),
        ((100,), 8, 1, "two do not fit: out of memory (measured"),
        ((), 8, 1, "could not be measured (out of memory)"),
    ],
)
def test_how_many_share_a_gpu(rates, most, share, told):
    found = decide(Tried(8, rates, 21.3, "out of memory"), most, "in 21 s")
    assert found.cells == share
    assert found.told.startswith(told)
    if share > 1:
        assert found.gain == rates[share.bit_length() - 1] / 100


@pytest.mark.parametrize(
    ("gpus", "cells", "most"),
    [
        ([Node(16, 2, "H200")], 100, 8),
        ([Node(16, 2, "H200")], 9, 4),  # cells to run
        ([Node(16, 2, "H200")], 3, 1),
        ([Node(6, 2, "H200")], 100, 3),  # cores
        ([Node(1, 2, "H200")], 100, 1),
        ([Node(16, 2, "H200"), Node(4, 2, "H200")], 100, 2),
        ([Node(16, 2, "H200"), Node(16, 2, "L4")], 100, 1),  # one request is for both
        ([Node(16, 2), Node(16, 2)], 100, 1),  # nobody knows whether they are alike
        ([Node(16, 2)], 100, 8),
        ([], 100, 1),
    ],
)
def test_room_on_a_gpu(gpus, cells, most):
    assert room(gpus, cells) == most


def test_the_policy_says_what_was_measured(small):
    share = Share(4, 2.9, "2.9 x the tokens/s of one (measured in 21 s on the largest cell)")
    assert share.on("2 GPUs") == (
        "2 GPUs, 4 cells on each: 2.9 x the tokens/s of one (measured in 21 s on the largest cell)"
    )
    assert Share().on("1 GPU") == "1 GPU, one cell on each"


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs that are not there, on each of which 4 cells pay; returns what was measured."""
    monkeypatch.setattr("tune_study.concurrency.visible_gpus", lambda: 2)
    monkeypatch.setattr(sharing, "gpu_names", lambda: ["H200", "H200"])
    monkeypatch.setattr(sharing, "cores", lambda: 16)
    monkeypatch.setattr(sharing.machine, "workers", lambda: 16)
    measured = []

    def measure(config, vocab_size, most):
        measured.append((config, most))
        return Tried(most, (100.0, 190.0, 290.0, 300.0)[: most.bit_length()], 21.3)

    monkeypatch.setattr(sharing, "on_this_machine", measure)
    return measured


def start(device="cuda", cells=24):
    study = search_spaces.get("smoke")
    study = study.replace(base=study.base.replace(device=device))
    return SimpleNamespace(study=study, todo=[None] * cells)


def test_a_start_measures_once_on_the_largest_cell(two_gpus, tmp_path):
    file, said = tmp_path / "sharing.json", []
    known = [start(), 300, None, file]
    dry = sharing.policy_for(*known, say=said.append)
    assert not file.exists()  # `plan` writes nothing
    first = sharing.policy_for(*known, keep=True, say=said.append)
    assert first == dry
    assert (first.at_once, first.cpus, first.gpus) == (8, 1, 0.25)
    assert first.speed == pytest.approx(2.9 / 4)
    assert first.why == (
        "2 GPUs, 4 cells on each: 2.9 x the tokens/s of one (measured in 21 s on the largest cell)"
    )
    assert len(two_gpus) == len(said) == 2
    config, most = two_gpus[0]
    assert (config.depth, config.device, most) == (2, "cuda", 8)
    again = sharing.policy_for(*known, keep=True)
    assert (again.at_once, again.gpus) == (8, 0.25)
    assert "(measured earlier on" in again.why
    fewer = sharing.policy_for(start(cells=5), 300, None, file)
    assert (fewer.at_once, fewer.gpus) == (4, 0.5)
    assert len(two_gpus) == 2
    other = sharing.policy_for(start(), 500, None, file)  # another shape
    assert "in 21 s" in other.why
    file.write_text('{"H200": {"most": 1}}')
    assert "in 21 s" in sharing.policy_for(*known).why


@pytest.mark.parametrize(
    ("plan", "asked", "at_once"),
    [
        (start(), 6, 6),
        (start(cells=3), None, 2),
        (start("cpu"), None, policy(start("cpu").study.base).at_once),
        (start("mps"), None, 1),
    ],
    ids=["--max-concurrent", "few cells", "cpu", "mps"],
)
def test_what_measures_nothing(two_gpus, tmp_path, plan, asked, at_once):
    found = sharing.policy_for(plan, 300, asked, tmp_path / "sharing.json", keep=True)
    assert found.at_once == at_once
    assert found.speed == 1
    assert not two_gpus
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_measures_on_a_node_of_its_own(two_gpus, tmp_path):
    def on_gpu(function, cpus):
        asked.append(cpus)
        if len(asked) > 1:
            raise RuntimeError("no GPU was free for 300 s")
        return function()

    asked = []
    cluster = SimpleNamespace(nodes=lambda: [Node(4), Node(8, 2, "H200")], on_gpu=on_gpu)
    plan = start()
    found = sharing.policy_for(plan, 300, None, tmp_path / "a", True, cluster)
    assert (found.at_once, found.gpus, asked) == (8, 0.25, [4])
    assert found.why.startswith("2 nodes, 2 GPUs, 4 cells on each: 2.9 x")
    failed = sharing.policy_for(plan, 300, None, tmp_path / "b", True, cluster)
    assert (failed.at_once, failed.gpus) == (2, 1)
    assert "one cell on each: could not be measured (no GPU was free for 300 s)" in failed.why
    assert not (tmp_path / "b").exists()


def test_the_largest_cell_is_that_of_most_arithmetic():
    study = search_spaces.get("isoparameter")
    largest = cost.largest(study, 8192)
    shapes = cost.shapes(((cell, 0) for cell in study.cells()), 8192)
    assert cost.shapes([(largest, 0)], 8192)[0].flops == max(shape.flops for shape in shapes)


# ------------------------------------- threads on a CPU; test_cost.py has the line of `plan`


def test_choices_use_all_cores_and_no_more_cells_than_there_are():
    assert choices(threads=1, cores=2, cells=234, workers=9) == [(2, 1), (1, 2)]
    assert choices(1, 12, 234, 99) == [(12, 1), (6, 2), (3, 4), (1, 8), (1, 12)]
    assert choices(3, 4, 234, 99) == [(4, 1), (2, 2), (1, 3), (1, 4)]
    assert choices(4, 2, 234, 99) == [(2, 1), (1, 2), (1, 4)]
    assert choices(1, 8, 3, 99) == [(3, 1), (3, 2), (2, 4), (1, 8)]
    assert choices(2, 8, 234, 2) == [(4, 2), (2, 4), (1, 8)]  # no memory for 8
    assert choices(1, 1, 234, 9) == [(1, 1)]


@pytest.mark.parametrize(
    ("rates", "study", "verdict"),
    [
        ((5210, 3100), 1, "threads = 1, as the study says, is the fastest here."),
        ((5210, 5000), 2, "threads = 2, as the study says, is nearly the fastest here."),
        ((3100, 5210), 1, "threads = 2 is 1.7 times as fast here as the study's 1. Take it by "),
    ],
)
def test_advice(rates, study, verdict):
    found = [Choice(2, 1, rates[0]), Choice(1, 2, rates[1])]
    line = advice(found, study)
    table = f"2 cells x 1 thread: {rates[0]:,}; 1 cell x 2 threads: {rates[1]:,}. "
    assert line.startswith(f"Tokens/s of the largest cell: {table}{verdict}")
    assert ("--set threads=2; it makes other cells" in line) == (rates[1] > 1.1 * rates[0])
    assert advice(found[:1], 1) == advice(found[1:], 1) == ""
