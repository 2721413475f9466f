"""Laws of the proof: what is sharded is found to be, and no single fault goes unseen"""
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.evidence import END, Trace, end_run, page_facts
from cpkv.inspect import (Difference, first_difference, inspect_text, inspect_trace, parse_event,
                          read_trace, shared_facts)
from cpkv.laws import InputError

PAGE_BYTES, LAYERS = dict(latent=64, index=32), dict(latent=[0, 1, 2], index=[0, 2])

class Toy:
    "One rank of an engine that only tells"
    def __init__(self, trace, cp_size, owner, *, tokens=64, shards=None, layers=LAYERS):
        R = self.cp_size = cp_size if shards is None else shards
        self.trace, self.owner, self.layers, local = trace, owner % R, layers, tokens // 4 // R + 1
        trace.event("pool", self, ranks=cp_size, cp_size=R, page_size=4, local_pages=local,
                    tokens=tokens, page_bytes={c: PAGE_BYTES[c] for c in layers}, layers=layers,
                    owner=self.owner, bytes={c: local * PAGE_BYTES[c] for c in layers})

    def owner_of_page(self, pages): return pages % self.cp_size

    def match(self, request, cached=()):
        self.trace.event("match", self, request=request, tokens=4 * len(cached) + 4,
                         cached=4 * len(cached), **page_facts(self, np.array(cached, int)))

    def write(self, c, layer, digest, pages):
        self.trace.event("write", self, component=c, layer=layer, digest=digest,
                         rows=4 * len(pages), bytes={c: len(pages)}, **page_facts(self, pages))

    def forward(self, request, pages, digest):
        pages = np.array(pages, int)
        for c in self.layers:
            for n in self.layers[c]: self.write(c, n, digest, pages[pages % self.cp_size == self.owner])
        self.trace.event("commit", self, request=request, tokens=4 * len(pages), digest=digest)
        self.trace.event("publish", self, request=request, tokens=4 * len(pages),
                         **page_facts(self, pages))

def script(toy):
    R = toy.cp_size
    toy.match(0)
    toy.forward(0, range(R, R + 5), 11)
    toy.match(1, [R, R + 1])
    toy.forward(1, [R + 5], 12)

def record(path: Path, R=2, play=script, role="prefill", size=None, first=0, end=True, **more) -> Path:
    gates = {"CPKV_DEBUG": f"trace:{path}"}
    for rank in range(R):
        trace = Trace(first + rank, size or R, gates)
        trace.role = role
        play(Toy(trace, R, rank, **more))
    if end: end_run(gates)
    return path

def events_of(path): return [json.loads(x) for x in path.read_text().splitlines() if x != END]
def rewrite(path, events, end=True):
    path.write_text("".join(json.dumps(e) + "\n" for e in events) + f"{END}\n" * end)
    return path

@pytest.fixture
def path(tmp_path): return tmp_path/"t.jsonl"

@pytest.fixture(scope="module")
def healthy(tmp_path_factory): return events_of(record(tmp_path_factory.mktemp("h")/"t.jsonl", 3))

# -- what is right

@pytest.mark.parametrize("R", [2, 3, 4, 8])
def test_a_sharded_cache_is_found_sharded(path, R):
    r = inspect_trace(record(path, R))
    assert r["ok"] and r["faults"] == [] and r["first_difference"] is None and r["runs"] == 1
    assert r["components"] == ["latent", "index"] and r["sharded"] == dict(latent=True, index=True)
    assert [p["owner"] for p in r["pools"]] == list(range(R))
    assert sum(p["pages"]["latent"] for p in r["pools"]) == 6
    for p in r["pools"]:
        assert p["bytes"] == {c: p["pages"][c] * PAGE_BYTES[c] for c in PAGE_BYTES}
        assert p["pool_bytes"] < p["replicated_bytes"] == 17 * 96
    json.dumps(r)

def test_components_are_those_that_the_events_hold(path):
    PAGE_BYTES.update(draft_latent=16)
    try: r = inspect_trace(record(path, layers=dict(latent=[0], index=[0], draft_latent=[7])))
    finally: del PAGE_BYTES["draft_latent"]
    assert r["sharded"] == dict(latent=True, index=True, draft_latent=True)

def test_one_rank_holds_the_whole_cache(path):
    r = inspect_trace(record(path, 1))
    assert r["ok"] and r["sharded"] == dict(latent=False, index=False)
    assert r["pools"][0]["pool_bytes"] == r["pools"][0]["replicated_bytes"]

def test_a_replicated_cache_is_right_and_not_sharded(path):
    r = inspect_trace(record(path, 3, shards=1))
    assert r["ok"] and r["sharded"] == dict(latent=False, index=False)

def test_a_forward_that_owns_nothing_is_a_forward(path):
    r = inspect_trace(record(path, 8, play=lambda toy: toy.forward(0, [8], 5)))
    assert r["ok"] and [p["pages"]["index"] for p in r["pools"]] == [1] + [0] * 7

def test_nothing_stored_is_not_sharded(path):
    r = inspect_trace(record(path, 2, play=lambda toy: None))
    assert r["ok"] and r["sharded"] == dict(latent=False, index=False)

def test_prefill_decode_and_oracle_in_one_file(path):
    def decode(toy):
        for src in (0, 1): toy.trace.event("recv", toy, request=0, tokens=20, peer=src, bytes={},
                                           **page_facts(toy, np.arange(1 + src, 6, 2)))
        toy.trace.event("commit", toy, request=0, tokens=20, digest=0)
        toy.forward(0, [5], 13)
    record(path, 2, size=4, end=False)
    record(path, 1, size=4, first=2, role="decode", play=decode, end=False)
    record(path, 1, size=4, first=3, role="oracle")
    r = inspect_trace(path)
    assert r["ok"] and r["sharded"] == dict(latent=True, index=True)
    assert [(p["role"], p["rank"], p["pages"]["index"]) for p in r["pools"]] == [
        ("prefill", 0, 3), ("prefill", 1, 3), ("decode", 2, 5), ("oracle", 3, 6)]
    assert "decode 2" in inspect_text(r) and "sharded: latent yes, index yes" in inspect_text(r)

def test_a_rank_may_make_several_pools(path):
    def twice(toy):
        script(toy)
        script(Toy(toy.trace, 2, toy.owner))
    r = inspect_trace(record(path, play=twice))
    assert r["ok"] and [(p["rank"], p["pool"]) for p in r["pools"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]

@given(st.randoms(use_true_random=False))
def test_how_lines_interleave_does_not_matter(healthy, tmp_path_factory, random):
    path = tmp_path_factory.mktemp("i")/"t.jsonl"
    left = {r: [e for e in healthy if e["rank"] == r] for r in range(3)}
    mixed = []
    while any(left.values()): mixed.append(left[random.choice([r for r in left if left[r]])].pop(0))
    a, b = inspect_trace(rewrite(path, mixed)), inspect_trace(rewrite(path, healthy))
    assert a == b and a["ok"]

@pytest.mark.parametrize("first,then", [(2, 2), (2, 3), (3, 2), (1, 4), (4, 1)])
def test_the_last_run_counts(path, first, then):
    record(path, first)
    record(path, then)
    r = inspect_trace(path)
    assert r["runs"] == 2 and len(r["pools"]) == then and r["ok"]
    assert "the last of 2 runs" in inspect_text(r)

# -- a run that did not end

def test_a_trace_that_is_cut_between_any_two_lines_proves_nothing(healthy, path):
    for n in range(1, len(healthy) + 1):
        r = inspect_trace(rewrite(path, healthy[:n], end=False))
        last = healthy[n - 1]
        assert not r["ok"] and not r["ended"] and not any(r["sharded"].values())
        assert r["faults"][0] == (f"the run did not end: the last that was written is prefill {last['rank']} "
                                  f"#{last['seq']} {last['kind']}")
        assert "no difference" not in inspect_text(r) and "latent yes" not in inspect_text(r)

def test_a_run_that_was_killed_before_or_after_another(path):
    record(path, end=False)
    record(path)
    r = inspect_trace(path)
    assert (r["runs"], r["ended"], r["ok"]) == (2, True, True)
    record(path, end=False)
    r = inspect_trace(path)
    assert (r["runs"], r["ended"], r["ok"]) == (3, False, False)

def test_an_end_is_of_one_run_and_the_last_of_it(healthy, path):
    text = rewrite(path, healthy).read_text()
    more = json.dumps(dict(healthy[-1], seq=healthy[-1]["seq"] + 1))
    for bad, why in ((text + END + "\n", "not a trace"), (END + "\n" + text, "not a trace"),
                     (text + more + "\n", "events are missing")):
        path.write_text(bad)
        with pytest.raises(InputError, match=why): inspect_trace(path)

# -- no single fault goes unseen

def is_seen(path) -> bool:
    try: return not inspect_trace(path)["ok"]
    except InputError: return True

def test_every_lost_line_is_seen(healthy, path):
    for i in range(len(healthy)):
        assert is_seen(rewrite(path, healthy[:i] + healthy[i + 1:])), healthy[i]

def test_every_line_that_comes_twice_is_seen(healthy, path):
    for i in range(len(healthy)):
        if healthy[i]["seq"] == 0: continue  # that is a new run, which has nothing else
        assert is_seen(rewrite(path, [*healthy[:i + 1], healthy[i], *healthy[i + 1:]])), healthy[i]

def test_every_cut_inside_a_line_is_refused(healthy, path):
    text = rewrite(path, healthy[:4]).read_text()
    for n in range(len(text)):
        path.write_text(text[:n])
        if text[:n].endswith("\n"): continue  # whole lines
        with pytest.raises(InputError): inspect_trace(path)

@pytest.mark.parametrize("fact", ["digest", "request", "tokens", "cached", "pages", "layer", "component",
                                  "page_size", "cp_size", "ranks", "owner", "local_pages", "page_bytes",
                                  "classes", "layers", "kind", "seq", "pool", "rank", "size"])
def test_every_changed_fact_of_one_rank_is_seen(healthy, path, fact):
    changed = 0
    for i, e in enumerate(healthy):
        if e["rank"] != 1 or fact not in e: continue
        new = {"pages": [[e["pages"][0][0] + 3, *e["pages"][0][1:]]] if e.get("pages") else [[4, 1, 1]],
               "classes": [n + 1 for n in e.get("classes", [])], "component": "other", "kind": "recv",
               "page_bytes": dict(latent=64, index=33), "layers": dict(latent=[0, 1], index=[0, 2])}
        new = new[fact] if fact in new else e[fact] + 1
        assert is_seen(rewrite(path, [*healthy[:i], dict(e, **{fact: new}), *healthy[i + 1:]])), e
        changed += 1
    assert changed

def test_two_writers_are_named(healthy, path):
    mine = {e["seq"]: e for e in healthy if e["rank"] == 0}
    i = next(i for i, e in enumerate(healthy) if e["rank"] == 1 and e.get("component") == "index")
    e = healthy[i]
    stolen = mine[e["seq"]]["pages"]  # rank 1 wrote what rank 0 wrote
    r = inspect_trace(rewrite(path, [*healthy[:i], dict(e, pages=stolen, classes=[2, 0, 0]), *healthy[i + 1:]]))
    assert not r["ok"] and r["sharded"] == dict(latent=False, index=False)
    assert any(f"page {stolen[0][0]} of index has two writers, prefill 0 and prefill 1" in f for f in r["faults"])
    assert any("has pages of others" in f for f in r["faults"])
    assert "WRONG" in inspect_text(r)

def test_two_writers_of_other_layers_are_two_writers(path):
    def crossed(toy):
        toy.write("latent", toy.owner, 3, np.array([2]))  # rank r writes page 2 in layer r
    r = inspect_trace(record(path, 2, play=crossed))
    assert any("page 2 of latent has two writers" in f for f in r["faults"])

@pytest.mark.parametrize("page,why", [(0, "is a sink"), (1, "is a sink"), (18, "outside the pool"), (10**15, "outside")])
def test_no_page_is_believed_unseen(path, page, why):
    def play(toy):
        if toy.owner == page % 2: toy.trace.event(
            "write", toy, component="index", layer=0, digest=1, rows=4, bytes={"index": 1},
            pages=[[page, 1, 1]], classes=[1, 0] if page % 2 == 0 else [0, 1])
    r = inspect_trace(record(path, 2, play=play))
    assert any(why in f for f in r["faults"]) and not r["ok"]

def test_a_missing_component_is_named(path):
    gates = {"CPKV_DEBUG": f"trace:{path}"}
    for rank in range(2): script(Toy(Trace(rank, 2, gates), 2, rank,
                                     layers={"latent": [0], **({"index": [0]} if rank == 0 else {})}))
    end_run(gates)
    r = inspect_trace(path)
    assert "rank 1 has no index" in r["faults"] and not any(r["sharded"].values())

def test_a_commit_without_its_bytes_is_named(path):
    def early(toy): toy.trace.event("commit", toy, request=0, tokens=4, digest=1)
    r = inspect_trace(record(path, play=early))
    assert sum("nothing was written to latent of layer 0" in f for f in r["faults"]) == 2

def test_an_arrival_that_never_came_is_named(path):
    def early(toy): toy.trace.event("commit", toy, request=0, tokens=4, digest=0)
    assert not inspect_trace(record(path, 1, play=early))["ok"]

def test_a_pool_larger_than_its_share_is_not_one_copy(path):
    events = events_of(record(path, 2))
    for e in events:
        if e["kind"] == "pool": e.update(local_pages=17, bytes=dict(latent=17 * 64, index=17 * 32))
    r = inspect_trace(rewrite(path, events))
    assert not r["ok"] and all("its share is 9" in f for f in r["faults"]) and len(r["faults"]) == 2

def test_buffers_that_are_not_what_they_say(path):
    events = events_of(record(path, 2))
    events[0]["bytes"]["index"] += 1
    assert any("has buffers of" in f for f in inspect_trace(rewrite(path, events))["faults"])

def test_a_rank_without_events_is_missed(healthy, path):
    r = inspect_trace(rewrite(path, [e for e in healthy if e["rank"] != 2]))
    assert any("3 ranks share a cache, but 2 left events" in f for f in r["faults"])

def test_sides_that_announce_other_buffers(path):
    def announce(digest): return lambda toy: toy.trace.event("register", toy, buffers=5, digest=digest)
    record(path, 1, size=2, play=announce("a"), end=False)
    assert len(inspect_trace(path)["faults"]) == 1  # that it did not end
    record(path, 1, size=2, first=1, role="decode", play=announce("b"))
    assert inspect_trace(path)["faults"] == ["prefill 0 and decode 1 announced different buffers"]

# -- the first difference

def test_the_earliest_difference_is_told_with_rank_and_seq(path):
    def astray(toy):
        script(toy)
        toy.match(7 + (toy.owner == 2))
        toy.match(9 + (toy.owner == 1))
    d = inspect_trace(record(path, 3, play=astray))["first_difference"]
    seq = next(e["seq"] for e in events_of(path) if e["rank"] == 0 and e.get("request") == 7)
    assert d == Difference((0, 2), (seq, seq), "match", "request", (7, 8))._asdict()

def test_a_rank_that_stops_early_has_no_more_events(path):
    def stops(toy):
        toy.match(0)
        if toy.owner == 0: toy.match(1)
    r = inspect_trace(record(path, play=stops))
    assert r["first_difference"]["seqs"] == (2, None) and "has no more events" in r["faults"][0]

def test_what_is_a_ranks_own_is_no_difference():
    e = dict(rank=0, size=2, role="a", seq=3, kind="write", pool=0, component="index", layer=1,
             digest=5, rows=8, bytes={}, pages=[[2, 2, 2]], classes=[2, 0])
    other = dict(e, rank=1, seq=9, rows=4, pages=[[3, 1, 1]], classes=[0, 1], bytes={"index": 3})
    assert shared_facts(e) == dict(kind="write", component="index", layer=1, digest=5)
    assert first_difference({0: [e], 1: [other]}) is None
    assert first_difference({0: [e], 1: [dict(other, format="fp8")]}).fact == "format"
    assert first_difference({4: [e]}) is None

# -- what is refused

@pytest.mark.parametrize("line,why", [
    ("", "Expecting value"), ("[]", "no event"), ("3", "no event"), ('{"kind": []}', "no event"),
    ('{"kind":"commit"}', "rank is missing"), ("[" * 100_000, None), ("NaN", "no event")])
def test_what_is_no_event(path, line, why):
    with pytest.raises((ValueError, RecursionError), match=why): parse_event(line)
    path.write_text(line + "\n")
    with pytest.raises(InputError, match="not a trace"): inspect_trace(path)

@pytest.mark.parametrize("fact,value", [
    ("rank", True), ("rank", -1), ("rank", 3), ("rank", 1.0), ("size", 0), ("seq", "0"), ("cp_size", 0),
    ("page_size", 0), ("ranks", 0), ("owner", 3), ("local_pages", None), ("layers", [1]),
    ("layers", {"latent": [0]}), ("layers", {"latent": 3}), ("page_bytes", {"latent": 1.5}), ("bytes", 7)])
def test_pools_that_cannot_be(healthy, path, fact, value):
    with pytest.raises(InputError, match="not a trace"):
        inspect_trace(rewrite(path, [dict(healthy[0], **{fact: value}), *healthy[1:]]))

@pytest.mark.parametrize("fact,value", [
    ("pages", [[1, 2]]), ("pages", [[1, 0, 1]]), ("pages", [[1, 1, 0]]), ("pages", [[-1, 1, 1]]),
    ("pages", {}), ("classes", [1, "a"]), ("layer", -1), ("component", ["index"]), ("digest", [3])])
def test_writes_that_cannot_be(healthy, path, fact, value):
    i = next(i for i, e in enumerate(healthy) if e["kind"] == "write")
    with pytest.raises(InputError, match="not a trace") as e:
        inspect_trace(rewrite(path, [*healthy[:i], dict(healthy[i], **{fact: value}), *healthy[i + 1:]]))
    assert e.value.facts["line"] == i + 1

def test_files_that_cannot_be_read(path, tmp_path):
    for bad in (tmp_path, tmp_path/"none"):
        with pytest.raises(InputError, match="cannot read"): inspect_trace(bad)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match="cannot read"): inspect_trace(path)
    path.write_text("")
    with pytest.raises(InputError, match="is empty"): read_trace(path)

def test_events_of_a_pool_that_was_not_made(healthy, path):
    one = [e for e in healthy if e["rank"] == 0]
    events = [dict(e, seq=i) for i, e in enumerate(one[1:])]
    with pytest.raises(InputError, match="a pool comes once"): inspect_trace(rewrite(path, events))
    again = [*one, dict(one[0], seq=len(one))]
    with pytest.raises(InputError, match="a pool comes once"): inspect_trace(rewrite(path, again))
