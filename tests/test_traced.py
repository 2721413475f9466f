"""Laws of evidence where it is used: same bits with it, a proof from a real run, faults that it shows"""
import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch

import cpkv.reader
from cpkv import cli
from cpkv import demo as demo_chapter
from cpkv.cli import main
from cpkv.demo import run_demo
from cpkv.engine import Engine, generate
from cpkv.evidence import END, STAGES, Marks, end_run
from cpkv.inspect import inspect_trace
from cpkv.launch import run_ranks
from cpkv.laws import ConservationError, PageIdError, OrderError, RankDied
from cpkv.model import TINY, Model, parse_config, random_weights
from cpkv.ops.table import REF
from cpkv.request import EngineConfig

TEXT = bytes(range(65, 91)) * 20
SIZES = EngineConfig(page_size=16, chunk=128, device_tokens=640, max_tokens=640)

def demo(backend, monkeypatch, debug):
    monkeypatch.setenv("CPKV_DEBUG", debug)
    return run_demo(text=TEXT, cp=2, num_output=3, backend=backend, timeout=60,
                    engine=dict(page_size=16, chunk=256))

def traced(fn, path, *args):
    "A run of two threads that writes a trace, with its end"
    gates = {"CPKV_DEBUG": f"trace:{path}"}
    run_ranks(fn, 2, *args, backend="local", env=[gates] * 2)
    end_run(gates)
    return inspect_trace(path)

def engine_of(peers, sizes=SIZES):
    config, world = parse_config(TINY), peers.world()
    return Engine(world, Model(config, random_weights(config, 0), peers.marks.ops(REF)), sizes)

def prefill(peers, num_tokens=200, sizes=SIZES):
    engine = engine_of(peers, sizes)
    return generate(engine, 0, np.arange(num_tokens) % 250, 2)[0]

def broken(peers):
    "A law error after a prefill"
    prefill(peers)
    if peers.rank == 1: raise ConservationError("page has two holders", page=7)
    peers.barrier()

def test_a_traced_run_has_the_same_bits_and_proves_itself(monkeypatch, tmp_path):
    path = tmp_path/"t.jsonl"
    off, on = demo("gloo", monkeypatch, "0"), demo("gloo", monkeypatch, f"trace:{path}")
    assert on == off and on["ok"]
    r = inspect_trace(path)
    assert r["ok"] and r["sharded"] == dict(latent=True, index=True), r["faults"]
    prefill = [p for p in r["pools"] if p["role"] == "prefill"]
    assert [p["rank"] for p in prefill] == [0, 1]
    assert all(p["pool_bytes"] < p["replicated_bytes"] for p in prefill)
    kinds = {json.loads(x)["kind"] for x in path.read_text().splitlines()}
    assert kinds == {"pool", "register", "write", "send", "recv", "commit", "publish", "match", "end"}
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert inspect_trace(path)["faults"][0].startswith("the run did not end")  # nobody said so
    path.write_text("".join(lines[:9] + lines[10:]))
    assert main(["inspect", str(path)]) in (1, 2)
    path.write_text("".join(lines)[:-20])
    assert main(["inspect", str(path)]) == 2

@pytest.mark.parametrize("backend,debug", [("gloo", {"CPKV_DEBUG": "1"}), ("local", {}),
                                           ("local", {"CPKV_DEBUG": "1"})])
def test_a_law_error_brings_the_events_home(backend, debug):
    with pytest.raises(ConservationError, match="two holders") as e:
        run_ranks(broken, 2, backend=backend, timeout=30, env=[debug] * 2)
    assert e.value.rank == 1
    if not debug: assert "events" not in e.value.facts; return
    events = e.value.facts["events"]
    assert len(events) == events[-1]["seq"] + 1 > 10 and {v["rank"] for v in events} == {1}
    assert any("last events of rank 1" in n for n in e.value.__notes__)

@pytest.mark.parametrize("placement", ["cyclic", "compute_owner"])
def test_a_store_list_that_leaks_is_found(monkeypatch, tmp_path, placement):
    "The owner filter's, or the one of direct writes"
    path, name = tmp_path/"t.jsonl", dict(cyclic="owned_rows", compute_owner="direct_rows")[placement]
    real = getattr(cpkv.reader, name)
    def leaky(plan):
        "Rank 1 stores a row of rank 0 in the place of its first own"
        src, loc = real(plan)
        mine = src + plan.rank * plan.split.max_rows * (placement == "compute_owner")
        others = np.setdiff1d(plan.order, mine)
        if plan.rank == 1 and len(others) and len(src):
            src = np.append(others[:1] - (mine[0] - src[0]), src[1:])
        return src, loc
    monkeypatch.setattr(cpkv.reader, name, leaky)
    if placement == "compute_owner":             # its rows are the rank's own, so a stray one lies outside
        with pytest.raises(PageIdError): run_ranks(prefill, 2, backend="local")
        return
    sizes = dataclasses.replace(SIZES, placement=placement)
    r = traced(prefill, path, 200, sizes)
    assert not r["ok"] and any("of latent has two writers" in f for f in r["faults"])
    assert any("owner 1 has pages of others" in f for f in r["faults"])

def test_a_replicated_reader_is_not_sharded(tmp_path):
    def run(peers):
        world, config = peers.world(), parse_config(TINY)
        sizes = EngineConfig(page_size=16, chunk=128, device_tokens=640, max_tokens=640,
                             reader="replicated", placement="cyclic")
        engine = Engine(world, Model(config, random_weights(config, 0), REF), sizes)
        generate(engine, 0, np.arange(100), 2)
    r = traced(run, tmp_path/"t.jsonl")
    assert r["ok"] and not any(r["sharded"].values())

def test_ranks_that_match_differently_part_there(tmp_path):
    def run(peers):
        engine = engine_of(peers)
        for i in range(2):
            r = engine.begin(i, np.arange(50) + i)
            engine.prefill(r)
            engine.finish(r)
        if peers.rank == 1: engine.tree.evict(1)
        engine.begin(2, np.arange(50))
    d = traced(run, tmp_path/"t.jsonl")["first_difference"]
    assert d is not None and (d["kind"], d["ranks"]) == ("match", (0, 1))

def main_job(monkeypatch, path):
    "The program on threads, shorter, with a trace"
    monkeypatch.setattr(cli, "run_demo", partial(run_demo, backend="local", num_output=2))
    monkeypatch.setenv("CPKV_DEBUG", f"trace:{path}")
    text = path.with_suffix(".txt")
    text.write_bytes(TEXT[:100])
    return main(["demo", "--file", str(text), "--host-bytes", "0"])  # no copy thread of a rank that dies

def test_the_program_says_the_end_of_its_run(monkeypatch, tmp_path, capsys):
    path = tmp_path/"t.jsonl"
    for runs in (1, 2):
        assert main_job(monkeypatch, path) == 0
        r = inspect_trace(path)
        assert r["ok"] and r["ended"] and r["runs"] == runs
    assert path.read_text().count(END) == 2 and main(["inspect", str(path)]) == 0

def test_a_run_whose_rank_died_proves_nothing(monkeypatch, tmp_path, capsys):
    path, real = tmp_path/"t.jsonl", demo_chapter._hand_off
    def dies(peers, engine, r, first_token, job):
        if peers.rank == 1 and r.request == 1: raise RankDied("rank 1 died: SIGKILL", rank=1)
        return real(peers, engine, r, first_token, job)
    monkeypatch.setattr(demo_chapter, "_hand_off", dies)
    assert main_job(monkeypatch, path) == 3
    capsys.readouterr()
    assert main(["inspect", str(path)]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "the run did not end" in err and "not proved" in out

def test_the_first_lines_of_a_trace_prove_nothing(monkeypatch, tmp_path, capsys):
    path = tmp_path/"t.jsonl"
    assert main_job(monkeypatch, path) == 0
    lines = path.read_text().splitlines(keepends=True)
    for n in (1, 50, len(lines) - 1):
        path.write_text("".join(lines[:n]))
        assert main(["inspect", str(path)]) == 1 and "the run did not end" in capsys.readouterr().err

class Heard(list):
    def range_start(self, name):
        self.append(name)
        return name
    def range_end(self, handle): self.append(f"/{handle}")

@pytest.mark.parametrize("level", [1, 2])
def test_all_stages_are_marked_and_closed(level):
    def run(peers, heard):
        peers.marks = Marks(level, heard)
        world, config = peers.world(), parse_config(TINY)
        world.marks = peers.marks
        engine = Engine(world, Model(config, random_weights(config, 0), peers.marks.ops(REF)), SIZES)
        return generate(engine, 0, np.arange(100), 2)[0]
    heard = [Heard(), Heard()]
    marked = [run_ranks(lambda p: run(p, heard[p.rank]), 2, backend="local")]
    plain = run_ranks(prefill, 2, 100, backend="local")
    assert marked[0] == plain
    stages = [[h for h in hs if h.strip("/") in STAGES] for hs in heard]
    assert stages[0] == stages[1] and (level == 2 or heard == stages)
    assert set(STAGES) <= set(heard[0]) and ("sparse_mla" in heard[0]) == (level == 2)
    assert sum(h.startswith("/") for h in heard[0]) * 2 == len(heard[0])

def test_the_program_refuses_before_it_starts(monkeypatch, tmp_path, capsys):
    for name, value in (("CPKV_DEBUG", f"trace:{tmp_path}/no/t"), ("CPKV_DEBUG", "on"), ("CPKV_NVTX", "9"),
                        ("CPKV_TRACE", "1"), *([] if torch.cuda.is_available() else [("CPKV_NVTX", "1")])):
        with monkeypatch.context() as m:
            m.setenv(name, value)
            assert main(["demo"]) == 2 and len(capsys.readouterr().err.splitlines()) == 1

def test_bench_refuses_under_debug(monkeypatch, capsys):
    monkeypatch.setenv("CPKV_DEBUG", "1")
    assert main(["bench", "plan"]) == 2 and "CPKV_DEBUG off" in capsys.readouterr().err

def test_inspect_needs_a_file(capsys):
    assert main(["inspect"]) == 2 and main(["inspect", "/no/such"]) == 2

def test_off_makes_no_event(monkeypatch):
    monkeypatch.setattr("cpkv.evidence.Trace.event", lambda *a, **k: pytest.fail("an event while off"))
    run_ranks(prefill, 2, 60, backend="local")

def test_an_error_without_run_ranks_has_them_too(monkeypatch):
    "torchrun has no parent that could carry them: the engine attaches"
    from cpkv.world import Solo
    config = parse_config(TINY)
    engine = Engine(Solo(debug=True), Model(config, random_weights(config, 0), REF), SIZES)
    r = engine.begin(0, np.arange(50))
    monkeypatch.setattr(engine, "_forward", lambda *_: (_ for _ in ()).throw(OrderError("x")))
    with pytest.raises(OrderError) as e: engine.step(r)
    assert [v["kind"] for v in e.value.facts["events"]] == ["pool", "match"]
