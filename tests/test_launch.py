"""Laws of a run: results in order, causes not echoes, nothing left running"""
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import rank_functions as rf
from cpkv.launch import cause, end_seconds, is_echo, probe, run_ranks
from cpkv.laws import (ConfigError, CpkvError, InputError, OrderError, PeerError, RankDied,
                       WaitTimeout)

def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as f: return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError): return False

def pids(folder, n: int) -> list[int]:
    stop = time.monotonic() + 30
    def told():
        texts = [p.read_text() for p in folder.iterdir() if p.name.isdigit()]
        return [int(t) for t in texts if t]
    while len(told()) < n and time.monotonic() < stop: time.sleep(.02)
    return told()

def nobody_left(ps: list[int]) -> bool:
    stop = time.monotonic() + 10
    while any(map(alive, ps)) and time.monotonic() < stop: time.sleep(.02)
    return len(ps) > 0 and not any(map(alive, ps))

@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_results_come_in_rank_order(backend, monkeypatch):
    monkeypatch.setenv("CPKV_LATE", "set after the server started" if backend == "gloo" else "")
    env = [{"CPKV_TEST": f"of rank {r}"} for r in range(5)] if backend == "gloo" else None
    got = run_ranks(rf.who, 5, torch.arange(3), backend=backend, env=env)
    assert [g[0] for g in got] == list(range(5)) and all(g[1].tolist() == [0, 1, 2] for g in got)
    late = "set after the server started"
    if env: assert [g[2:] for g in got] == [(e["CPKV_TEST"], late) for e in env]
    assert "CPKV_TEST" not in os.environ

@pytest.mark.parametrize("size", [1, 2])
def test_the_probe_sees_all(size):
    for r in run_ranks(probe, size):
        assert r == {"seen": list(range(size)), "received": {0: 8 * (size - 1)}, "threads": 1,
                     "backend": "solo" if size == 1 else "gloo"}

def test_a_killed_rank_ends_everything_in_seconds_and_is_named(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankDied, match=r"rank 1 died: SIGKILL") as e:
        run_ranks(rf.fail, 3, "kill", 1, str(tmp_path))
    assert time.monotonic() - start < 10 and e.value.exit_code == 3 and e.value.rank == 1
    assert nobody_left(pids(tmp_path, 3))

@pytest.mark.parametrize("how,error,text", [
    ("raise", CpkvError, r"rank-local trouble \[page=7\]"), ("key", KeyError, "x"),
    ("unpicklable", CpkvError, "rank 1 raised TwoArguments: 1/2"),
    ("result", TypeError, "cannot pickle"), ("exit", CpkvError, "SystemExit: 5")])
def test_an_error_comes_home_with_type_rank_and_traceback(how, error, text, tmp_path):
    with pytest.raises(error, match=text) as e:
        run_ranks(rf.fail, 3, how, 1, str(tmp_path), timeout=20)
    where, trace = e.value.__notes__
    assert e.value.rank == 1 and "rank 1 of 3" in where and "Traceback" in trace
    assert not isinstance(e.value, PeerError) and nobody_left(pids(tmp_path, 3))
    if how == "raise": assert e.value.facts == {"page": 7} and type(e.value) is CpkvError

@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_a_rank_that_does_not_come_is_a_timeout_with_its_number(how, tmp_path, monkeypatch):
    monkeypatch.setattr("cpkv.launch.GRACE", .2)
    start = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"rank 0 waited 1 s for rank 1 in control#1 barrier"):
        run_ranks(rf.fail, 2, how, 1, str(tmp_path), timeout=1)
    assert time.monotonic() - start < 3 + end_seconds(1) and nobody_left(pids(tmp_path, 2))

def test_a_run_is_bounded_as_a_whole(tmp_path):
    with pytest.raises(WaitTimeout, match=r"no result within 1 s \[ranks=\[0\]\]"):
        run_ranks(rf.fail, 1, "sleep", 0, str(tmp_path), limit=1)
    assert nobody_left(pids(tmp_path, 1))

@pytest.mark.parametrize("env,configs,text", [
    ([{}, {}, {}], [{"cp": 3, "chunk": 8}, {"cp": 3, "chunk": 8}, {"cp": 3, "chunk": 9}],
     "config.chunk is 8 on ranks 0 and 1, 9 on rank 2"),
    ([{}, {"CPKV_LATE": "2"}], [{}, {}], "env.CPKV_LATE is not set on rank 0, 2 on rank 1"),
    ([{"CPKV_DEBUG": "1"}, {}], [{}, {}], "debug is on on rank 0, off on rank 1; env.CPKV_DEBUG")])
def test_ranks_that_start_differently_are_refused(env, configs, text):
    with pytest.raises(ConfigError) as e:
        run_ranks(rf.start, len(env), configs, env=env, timeout=20)
    assert text in str(e.value) and e.value.exit_code == 2

def test_nothing_starts_for_a_function_without_an_address(monkeypatch):
    monkeypatch.setattr("cpkv.launch.start_server", lambda: pytest.fail("started"))
    def inner(peers): return 0
    for fn in (lambda peers: 0, inner):
        with pytest.raises(InputError, match="cannot be imported by a new process"):
            run_ranks(fn, 2)
    monkeypatch.setattr(rf.who, "__module__", "__main__")
    with pytest.raises(InputError, match="who of __main__ cannot be imported"): run_ranks(rf.who, 2)

@pytest.mark.parametrize("call,text", [
    (lambda: run_ranks(rf.who, 0), "at least one rank"),
    (lambda: run_ranks(rf.who, 2, lambda: 0), "must be picklable"),
    (lambda: run_ranks(rf.who, 2, env=[{}]), "one mapping a rank")])
def test_bad_input_is_one_sentence(call, text):
    with pytest.raises(InputError, match=text) as e: call()
    assert e.value.exit_code == 2

def test_causes_go_before_echoes():
    lost, late, law, dead = (PeerError("lost"), WaitTimeout("late"), OrderError("law"),
                             RankDied("dead"))
    assert [is_echo(e) for e in (lost, late, law, dead)] == [True, True, False, False]
    assert cause([lost, late, law]) is law and cause([lost, dead]) is dead
    assert cause([law, dead]) is law
    assert cause([lost, late]) is late and late.__notes__ == ["also: lost"]

CALLER = """
import sys, rank_functions as rf
from cpkv.launch import run_ranks
run_ranks(rf.fail, 2, "sleep", 0, sys.argv[1])   # no guard: a child must not run this again
"""

def test_ranks_do_not_outlive_their_caller(tmp_path):
    (tmp_path / "caller.py").write_text(CALLER)
    here = os.path.dirname(os.path.abspath(__file__))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(here), here])}
    caller = subprocess.Popen([sys.executable, str(tmp_path / "caller.py"), str(tmp_path)], env=env)
    ranks = pids(tmp_path, 2)
    assert len(ranks) == 2 and all(map(alive, ranks)) and caller.poll() is None
    caller.send_signal(signal.SIGKILL)
    caller.wait(10)
    assert nobody_left(ranks)


def kill_the_server(context):
    "As an operator would: the server that ranks are forked from gets SIGKILL"
    from multiprocessing import forkserver
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)

def test_a_server_that_dies_before_a_start_is_a_lost_peer_and_the_next_run_is_fine(monkeypatch):
    from cpkv import launch
    real = launch.start_server
    def doomed():
        context = real()
        kill_the_server(context)
        return context
    monkeypatch.setattr(launch, "start_server", doomed)
    with pytest.raises(PeerError, match="cannot be started"): run_ranks(probe, 2, timeout=10)
    monkeypatch.undo()
    assert [r["seen"] for r in run_ranks(probe, 2, timeout=30)] == [[0, 1]] * 2
