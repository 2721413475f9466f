"""Laws of what ranks tell: free when off, whole lines, plain facts, and events with every law error"""
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpkv import laws
from cpkv.evidence import (END, HEAD, KEEP, KINDS, TRACE_FILE, VARIABLES, Events, Marks, Trace, append,
                           buffer_facts, check_gates, debug_of, draw_events, end_run, event_text, gates_of,
                           nvtx_of, page_facts, pages_in, refuse_numbers, runs_of, trace_file)
from cpkv.laws import ConfigError, InputError, LawError, OrderError, PeerError, RankDied
from cpkv.layout import PageLayout

ON = {"CPKV_DEBUG": "1"}

class Pool:
    "Anything that can be looked at weakly"

def facts_of(kind: str) -> dict:
    return {k: 0 for k in (*KINDS[kind].shared, *KINDS[kind].own)}

# -- variables

@pytest.mark.parametrize("value,on,file", [
    ("", False, None), ("0", False, None), ("1", True, None), ("trace", True, TRACE_FILE),
    ("trace:a b.jsonl", True, "a b.jsonl"), ("trace:C:x", True, "C:x")])
def test_debug_is_on_or_off_and_may_have_a_file(value, on, file):
    gates = {"CPKV_DEBUG": value}
    assert (debug_of(gates), trace_file(gates)) == (on, file)
    assert Trace(gates=gates).on == on

def test_nothing_set_is_off():
    assert not debug_of({}) and nvtx_of({}) == 0 and nvtx_of({"CPKV_NVTX": ""}) == 0

@pytest.mark.parametrize("value", ["yes", "2", "true", "trace:", "traces", "TRACE", " 1", "off"])
def test_debug_refuses_what_means_nothing(value):
    with pytest.raises(ConfigError, match="CPKV_DEBUG must be"): debug_of({"CPKV_DEBUG": value})
    with pytest.raises(ConfigError): Trace(gates={"CPKV_DEBUG": value})

@pytest.mark.parametrize("value", ["3", "-1", "on", "1.0"])
def test_nvtx_refuses_what_means_nothing(value):
    with pytest.raises(ConfigError, match="CPKV_NVTX must be"): nvtx_of({"CPKV_NVTX": value})

def test_only_our_variables_are_gates():
    assert gates_of({"PATH": "x", "CPKV_B": "2", "CPKV_A": "1"}) == {"CPKV_A": "1", "CPKV_B": "2"}

def test_check_gates_knows_its_table_and_nothing_else():
    assert [name for name, *_ in VARIABLES] == ["CPKV_DEBUG", "CPKV_NVTX"]
    assert check_gates({"PATH": "x", **ON, "CPKV_NVTX": "0"}) == {**ON, "CPKV_NVTX": "0"}
    with pytest.raises(ConfigError, match="no variable CPKV_DEBUGG"): check_gates({"CPKV_DEBUGG": "1"})

def test_check_gates_looks_at_the_file_and_makes_none(tmp_path):
    there = tmp_path/"t.jsonl"
    check_gates({"CPKV_DEBUG": f"trace:{there}"})
    assert not there.exists()
    for bad in (tmp_path, tmp_path/"no"/"t.jsonl"):
        with pytest.raises(ConfigError, match="cannot write"): check_gates({"CPKV_DEBUG": f"trace:{bad}"})

@pytest.mark.parametrize("text", ["a text", "a text\n", "\n", "{}\n", "[1]\n", '{"kind": "pool"}\n', "\xff\n",
                                  "[" * 100_000 + "\n", "\0" * (3 << 20)])
def test_a_run_is_never_added_to_what_is_no_trace(tmp_path, text):
    path = tmp_path/"t"
    path.write_text(text, encoding="latin-1")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="nothing is added"): check_gates({"CPKV_DEBUG": f"trace:{path}"})
    assert path.read_bytes() == before

def test_a_run_is_added_to_an_empty_file_and_to_a_trace_of_whole_lines(tmp_path):
    path = tmp_path/"t.jsonl"
    gates = {"CPKV_DEBUG": f"trace:{path}"}
    path.touch()
    assert check_gates(gates) == gates
    told(Trace(gates=gates), 3, Pool())
    assert check_gates(gates) == gates
    end_run(gates)
    assert check_gates(gates) == gates and path.read_text().splitlines()[3:] == [END]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="is cut"): check_gates(gates)

def test_a_device_takes_what_it_is_given(): check_gates({"CPKV_DEBUG": "trace:/dev/null"})

def test_an_end_is_written_where_events_are_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for gates in ({}, ON, {"CPKV_DEBUG": "0"}): end_run(gates)
    assert list(tmp_path.iterdir()) == []
    end_run({"CPKV_DEBUG": "trace", "PATH": "x"})
    assert (tmp_path/TRACE_FILE).read_text() == END + "\n"

@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_marks_without_a_device_are_refused():
    for level in ("1", "2"):
        with pytest.raises(ConfigError, match="CUDA"): check_gates({"CPKV_NVTX": level})

@pytest.mark.parametrize("value", ["1", "trace", "trace:x"])
def test_numbers_are_refused_under_debug(value):
    with pytest.raises(ConfigError, match="CPKV_DEBUG off"): refuse_numbers({"CPKV_DEBUG": value})

def test_numbers_are_taken_otherwise():
    for gates in ({}, {"CPKV_DEBUG": "0"}, {"CPKV_NVTX": "2"}): refuse_numbers(gates)

# -- facts

@given(st.lists(st.integers(0, 300), max_size=40))
def test_runs_are_a_bijection(pages): assert pages_in(runs_of(pages)) == pages

@given(st.integers(0, 50), st.integers(1, 500), st.integers(1, 64))
def test_pages_of_one_owner_are_one_run(first, number, step):
    runs = runs_of(range(first, first + number * step, step))
    assert len(runs) == 1 and runs[0][:2] == [first, number]

@given(st.sets(st.integers(0, 400), max_size=30), st.integers(1, 8))
def test_page_facts_count_every_page_at_its_owner(pages, R):
    facts = page_facts(PageLayout(cp_size=R, page_size=4), np.array(sorted(pages), np.int32))
    assert pages_in(facts["pages"]) == sorted(pages)
    assert facts["classes"] == [sum(p % R == r for p in pages) for r in range(R)]
    json.dumps(facts)

def test_buffer_facts_leave_out_layers_without_a_buffer():
    @dataclass
    class B:
        component: str
        layer: int
        page_bytes: int
        pages: torch.Tensor
    full, none = torch.zeros(3, 8, dtype=torch.uint8), torch.zeros(0, 8, dtype=torch.uint8)
    got = buffer_facts([B("latent", 0, 8, full), B("latent", 1, 8, full), B("index", 0, 0, none),
                        B("index", 1, 8, full)])
    assert got == dict(layers=dict(latent=[0, 1], index=[1]), page_bytes=dict(latent=16, index=8),
                       bytes=dict(latent=48, index=24))

@pytest.mark.parametrize("bad", [
    torch.zeros(2), torch.tensor(1), np.int64(1), np.zeros(1), np.float32(1), b"x", {1, 2}, object(),
    [1, [torch.tensor(1)]], {"a": {"b": np.int32(0)}}, (np.bool_(True),)], ids=lambda v: str(type(v)))
def test_an_event_is_never_a_tensor(bad):
    t = Trace(on=True)
    with pytest.raises(TypeError, match="plain"): t.event("commit", t, request=0, tokens=0, digest=bad)
    assert (t.seq, len(t.ring)) == (0, 0)

@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_facts(kind):
    t, pool = Trace(on=True), Pool()
    for lacking in facts_of(kind):
        with pytest.raises(TypeError, match=f"lacks {lacking}"):
            t.event(kind, pool, **{k: v for k, v in facts_of(kind).items() if k != lacking})
    t.event(kind, pool, **facts_of(kind), more="said")
    assert len(t.ring) == 1 and [*t.ring[0]][:len(HEAD)] == [*HEAD]

def test_kinds_are_these():
    assert [*KINDS] == ["pool", "register", "write", "send", "recv", "commit", "publish", "match"]
    with pytest.raises(KeyError): Trace(on=True).event("evict", Pool())
    with pytest.raises(TypeError, match="multiple values"):  # the head of an event is not to be forged
        Trace(on=True).event("commit", Pool(), **facts_of("commit"), rank=3)

# -- traces

def told(trace: Trace, n: int, pool: object) -> Trace:
    for i in range(n): trace.event("commit", pool, request=i, tokens=1, digest=i)
    return trace

def test_off_keeps_nothing_and_looks_at_nothing():
    t = Trace()
    t.event("nonsense", None, rank=object())
    assert not t.on and t.seq == 0 and not t.ring and t.path is None and type(t.on) is bool

def test_debug_as_an_argument_wins():
    assert Trace(on=True).on and Trace(on=True).path is None
    off = Trace(gates={"CPKV_DEBUG": "trace"}, on=False)
    assert not off.on and off.path is None

def test_the_ring_keeps_the_last_thousand():
    t = told(Trace(gates=ON), KEEP + 234, Pool())
    assert len(t.ring) == KEEP == 1000
    assert [e["seq"] for e in t.ring] == list(range(234, 1234))

def test_pools_are_numbered_for_good():
    t = Trace(on=True)
    for i in range(5):  # a pool that is gone does not give its number to the next
        told(t, 2, Pool())
        assert t.ring[-1]["pool"] == t.ring[-2]["pool"] == i
    kept = Pool()
    told(t, 1, kept), told(t, 1, Pool()), told(t, 1, kept)
    assert [e["pool"] for e in list(t.ring)[-3:]] == [5, 6, 5]

def test_a_trace_keeps_no_pool_alive():
    import weakref
    t, pool = Trace(on=True), Pool()
    seen = weakref.ref(told(t, 1, pool) and pool)
    del pool
    assert seen() is None

def test_lines_are_the_ring(tmp_path):
    path = tmp_path/"t.jsonl"
    t = told(Trace(1, 3, {"CPKV_DEBUG": f"trace:{path}"}), 7, Pool())
    assert [json.loads(x) for x in path.read_text().splitlines()] == list(t.ring)
    assert (t.ring[0]["rank"], t.ring[0]["size"], t.ring[0]["role"]) == (1, 3, "rank")

def test_the_file_stays_where_it_was_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    t = Trace(gates={"CPKV_DEBUG": "trace"})
    (tmp_path/"other").mkdir()
    monkeypatch.chdir(tmp_path/"other")
    told(t, 1, Pool())
    assert (tmp_path/TRACE_FILE).exists() and not (tmp_path/"other"/TRACE_FILE).exists()

def test_a_file_that_cannot_be_written_is_a_refusal(tmp_path):
    t = Trace(gates={"CPKV_DEBUG": f"trace:{tmp_path}"})
    with pytest.raises(ConfigError, match="cannot write"): told(t, 1, Pool())

def test_a_line_that_is_cut_is_a_refusal(tmp_path, monkeypatch):
    import builtins
    class Short:
        def __init__(self, *args, **kwargs): pass
        def __enter__(self): return self
        def __exit__(self, *args): pass
        def write(self, line): return len(line) - 1
    monkeypatch.setattr(builtins, "open", Short)
    with pytest.raises(ConfigError, match="cut"): append("x", b"line\n")

WRITER = """
import sys
from cpkv.evidence import Trace
rank, path = int(sys.argv[1]), sys.argv[2]
t = Trace(rank, 3, {"CPKV_DEBUG": "trace:" + path})
for i in range(300): t.event("commit", t, request=i, tokens=1, digest="d" * (i % 7 * 900))
"""

def test_processes_do_not_tear_each_others_lines(tmp_path):
    path = tmp_path/"t.jsonl"
    ps = [subprocess.Popen([sys.executable, "-c", WRITER, str(r), str(path)]) for r in range(3)]
    assert [p.wait(60) for p in ps] == [0, 0, 0]
    events = [json.loads(x) for x in path.read_text().splitlines()]
    for r in range(3): assert [e["seq"] for e in events if e["rank"] == r] == list(range(300))
    assert len({e["rank"] for e in events[:1]}) == 1 and len(events) == 900

def test_a_trace_draws_itself():
    t = told(Trace(gates=ON), 40, Pool())
    assert "<svg" in t._repr_html_() and "commit" in draw_events(t.ring).text
    assert "40 events" in repr(t) and draw_events([]).text is not None
    assert event_text(t.ring[0]) == "#0 commit request=0 tokens=1 digest=0"
    long = dict(t.ring[0], digest="x" * 500)
    assert len(event_text(long)) == 100

# -- law errors

LAW_ERRORS = [c for c in vars(laws).values() if isinstance(c, type) and issubclass(c, LawError)]

@pytest.mark.parametrize("cls", LAW_ERRORS)
def test_every_law_error_takes_the_events_along(cls):
    t = told(Trace(2, 4, ON), 1100, Pool())
    e = t.attach(cls("broken", page=3))
    back = pickle.loads(pickle.dumps(e))
    assert type(back) is cls and back.message == "broken" and back.facts["page"] == 3
    assert len(back.facts["events"]) == 1000 and back.facts["events"] == list(t.ring)
    assert str(e) == "broken [page=3]" and str(back) == "broken [page=3, events=the last 1000]"
    note, = e.__notes__
    assert note.splitlines()[0] == "last events of rank 2:" and "#1099 commit" in note.splitlines()[-1]

def test_a_second_trace_changes_nothing():
    a, b = told(Trace(0, 2, ON), 3, Pool()), told(Trace(1, 2, ON), 5, Pool())
    e = b.attach(a.attach(OrderError("x")))
    assert len(e.facts["events"]) == 3 and len(e.__notes__) == 1

def test_events_of_an_error_are_a_copy():
    t = told(Trace(gates=ON), 2, Pool())
    e = t.attach(OrderError("x"))
    told(t, 5, t)
    assert len(e.facts["events"]) == 2 and json.loads(json.dumps(e.facts))["events"] == e.facts["events"]

@pytest.mark.parametrize("error", [InputError("x"), ConfigError("x"), PeerError("x"), RankDied("x"),
                                   ValueError("x"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_other_errors_are_left_alone(error):
    t = told(Trace(gates=ON), 2, Pool())
    assert t.attach(error) is error and not getattr(error, "__notes__", [])
    assert "events" not in getattr(error, "facts", {})

def test_off_attaches_nothing():
    e = Trace().attach(OrderError("x"))
    assert e.facts == {} and not hasattr(e, "__notes__")

def test_a_copy_of_an_error_keeps_the_events():
    e = told(Trace(gates=ON), 4, Pool()).attach(OrderError("rank 1 differs"))
    copy = type(e)("rank 1 (prefill) differs", **e.facts)
    assert isinstance(copy.facts["events"], Events) and len(copy.facts["events"]) == 4

# -- marks

class Heard(list):
    "A backend that hands out handles, and notices one that is ended twice"
    def __init__(self): self.open, self.next = {}, 0
    def range_start(self, name):
        self.next += 1
        self.open[self.next] = name
        self.append(f"<{name}")
        return self.next
    def range_end(self, handle): self.append(f"{self.open.pop(handle)}>")

@dataclass(frozen=True, slots=True, kw_only=True)
class Verbs:
    name: str
    double: Callable
    fail: Callable

VERBS = Verbs(name="toy", double=lambda x, *, n=2: n * x, fail=lambda: 1 / 0)

def test_off_is_the_same_empty_block_each_time():
    heard = Heard()
    off = Marks(0, heard)
    assert off.range("gather") is off.range("store") is Marks().range("x") and not off.on
    with off.range("gather"): pass
    assert heard == [] and off.ops(VERBS) is VERBS

def test_stages_are_ranges_and_verbs_are_not():
    heard = Heard()
    with Marks(1, heard).range("attend"): assert Marks(1, heard).ops(VERBS).double(4) == 8
    assert heard == ["<attend", "attend>"]

def test_verbs_are_ranges_from_level_two():
    heard = Heard()
    ops = Marks(2, heard).ops(VERBS)
    assert type(ops) is Verbs and ops.name == "toy" and ops.double(4, n=3) == 12
    with pytest.raises(ZeroDivisionError): ops.fail()
    assert heard == ["<double", "double>", "<fail", "fail>"] and not heard.open

def test_two_batches_in_turn_do_not_nest():
    heard, marks = Heard(), None
    marks = Marks(1, heard)
    def batch(name):
        with marks.range(name): yield
    a, b = batch("a"), batch("b")
    next(a), next(b)
    assert next(a, None) is next(b, None) is None
    assert heard == ["<a", "<b", "a>", "b>"] and not heard.open

def test_an_abandoned_block_is_closed():
    heard = Heard()
    def batch():
        with Marks(1, heard).range("gather"): yield
    steps = batch()
    next(steps)
    steps.close()
    assert heard == ["<gather", "gather>"]

def test_the_real_table_keeps_its_bits():
    from cpkv.ops.table import REF
    heard, x = Heard(), torch.randn(32, 8)
    ops = Marks(2, heard).ops(REF)
    assert ops.name == REF.name and torch.equal(ops.silu_mul(x, x), REF.silu_mul(x, x))
    assert heard == ["<silu_mul", "silu_mul>"]

@pytest.mark.cuda
def test_real_ranges():
    with Marks(2).range("plan"): assert Marks(2).ops(VERBS).double(1) == 2
