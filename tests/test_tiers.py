"What comes back from the host tier is what went there, target and draft, on every rank, or it is computed again"
import threading
import zlib
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkv.alloc import Holder
from cpkv.copies import Copies
from cpkv.copy_thread import Gate, Hold
from cpkv.engine import Engine, decode
from cpkv.launch import run_ranks
from cpkv.laws import ConfigError, InputError, ResidencyError, WaitTimeout
from cpkv.model import TINY, Model, parse_config, random_weights
from cpkv.mtp import Draft
from cpkv.nextn import NextN, random_nextn
from cpkv.nodes import Tier
from cpkv.ops.table import REF
from cpkv.request import EngineConfig, greedy
from cpkv.schedule import Scheduler, Want
from cpkv.settle import WRITES
from cpkv.tiers import DeviceAndHost
from cpkv.world import Solo

P, TEXT = 8, np.random.default_rng(11).integers(0, 256, 400)


@cache
def models():
    config = parse_config(TINY, layers=2)
    model = Model(config, random_weights(config, 1), REF)
    return model, Draft(NextN(model, random_nextn(config, 1)))

def engine_of(world, tokens=96, host=1 << 22, drafting=True, chunk=40, **more) -> Engine:
    model, draft = models()
    sizes = EngineConfig(page_size=P, chunk=chunk, device_tokens=tokens, max_tokens=tokens, host_bytes=host, **more)
    engine = Engine(world, model, sizes, draft=draft if drafting else None)
    engine.pool.poison(range(engine.pool.local_pages))
    real = engine.run
    def run(*args, **how):
        out = real(*args, **how)
        engine.check()                                               # law 1, in both tiers, after every step
        return out
    engine.run = run
    return engine

def rows_of(engine, r, positions) -> dict:
    "Pages of this rank by place in the request and buffer, whole pages of the first positions"
    lay, out = engine.layout, {}
    for j, p in enumerate(r.pages[:positions // P].tolist()):
        if lay.owner_of_page(p) != engine.world.rank % lay.cp_size: continue
        for i, b in enumerate(engine.pool.buffers):
            if len(b.pages): out[j, i] = b.pages[lay.local_page_of(p)].clone()
    return out

def serve(engine, i, prompt, num=4):
    "One prompt to its end; tokens, bytes of its whole pages, where its prefix was found"
    r = engine.begin(i, prompt)
    first = engine.prefill(r)
    found = r.cached, r.cached_host
    tokens, _ = decode(engine, r, greedy(first), num)
    said = tokens, rows_of(engine, r, r.computed), found
    engine.finish(r)
    engine.check()
    return said

@cache
def cold(key: bytes):
    "The same prompt on one rank with one tier and nothing known"
    prompt = np.frombuffer(key, np.int64)
    engine = engine_of(Solo(), host=0, tokens=256, reader="replicated")
    return serve(engine, 0, prompt)

def same(prompt, said) -> bool:
    "All ranks together: tokens, and every byte of target and draft"
    tokens, rows, _ = cold(np.ascontiguousarray(prompt, np.int64).tobytes())
    mine = {k: v for _, got, _ in said for k, v in got.items()}
    return all(t == tokens for t, *_ in said) and mine.keys() == rows.keys() and all(
        torch.equal(mine[k], rows[k]) for k in rows)

def close(engine) -> int:
    leaked = engine.leaked_pages()
    engine.close()
    return leaked

A, B = TEXT[:70], TEXT[100:170]
LATER = np.append(A, TEXT[300:310])


def talk(peers, prompts, **more):
    engine = engine_of(peers.world(), **more)
    said = [serve(engine, i, p) for i, p in enumerate(prompts)]
    return said, engine.tiers.numbers(), close(engine)

@pytest.mark.parametrize("R,how", [(1, {}), (2, {}), (2, dict(placement="cyclic", reader="full_view")), (3, {}),
                                   (2, dict(policy="write_back")), (4, {}), (2, dict(drafting=False)),
                                   (2, dict(reader="replicated", placement="cyclic"))], ids=str)
def test_a_prefix_comes_back_from_the_host_with_the_bytes_of_a_cold_run(R, how):
    "Two prompts that do not fit together: the second sends the first to the host, its next turn fetches it"
    def rank(peers): return talk(peers, [A, B, LATER], **how)
    got = run_ranks(rank, R, backend="local")
    if how.get("drafting", True):
        for i, prompt in enumerate((A, B, LATER)): assert same(prompt, [said[i] for said, _, _ in got])
    founds = [[found for _, _, found in said] for said, _, _ in got]
    assert founds == founds[:1] * R and founds[0][0] == founds[0][1] == (0, 0)
    total, host = founds[0][2]
    assert total == 64 and 0 < host <= total
    for _, n, leaked in got:
        assert leaked == 0 and n["host_loaded_pages"] * P == host and n["host_written_pages"] >= host // P

def test_the_same_on_processes():
    got = run_ranks(_processes, 2, backend="gloo", timeout=60)
    for i, prompt in enumerate((A, B, LATER)): assert same(prompt, [said[i] for said, _, _ in got])
    assert all(said[2][2][1] > 0 and leaked == 0 for said, _, leaked in got)

def _processes(peers): return talk(peers, [A, B, LATER])

def test_without_a_host_tier_the_evicted_part_is_computed_again():
    got = run_ranks(lambda peers: talk(peers, [A, B, LATER], host=0), 2, backend="local")
    assert got[0][0][2][2][1] == 0 and got[0][0][2][2][0] < 64 and same(LATER, [said[2] for said, *_ in got])

def test_selective_write_through_waits_for_the_second_use():
    def rank(peers):
        engine = engine_of(peers.world(), after_hits=2, tokens=256)
        written = []
        for i in range(3):
            serve(engine, i, A)
            engine.tiers.finish()
            written.append(engine.tiers.numbers()["host_written_pages"])
        return written, close(engine)
    [(written, leaked), _] = run_ranks(rank, 2, backend="local")
    assert leaked == 0 and written[0] == 0 and written[-1] >= 8      # whole pages of the prompt, at least

def test_an_unacked_copy_is_not_matched():
    "Between issue and ack a host hit is 0, also when the device copy is gone"
    engine = engine_of(Solo())
    r = engine.begin(0, A)
    engine.prefill(r)
    engine.finish(r)
    match = engine.tree.match(engine.tree.reusable(A))
    assert len(match.pages) == 8 and [n.residency[Tier.HOST].name for n in match.path] == ["PENDING"]
    assert len(match.host_pages) == 0 and close(engine) == 0

class Breaks(Hold):
    "Stands before a layer of a load until a reader asks for it, and then fails, on one rank, once"
    def __init__(self, at: int, is_here: bool):
        super().__init__(by_page=False)
        self.at, self.is_here, self.asked, self.loads = at, is_here, threading.Event(), set()

    def step(self, op_id, layer, page):
        if op_id in self.loads and layer == self.at:
            assert self.asked.wait(10)
            if self.is_here:
                self.is_here = False
                raise ResidencyError("a byte flipped", op=op_id)
        super().step(op_id, layer, page)

@pytest.mark.parametrize("R,at", [(1, 1), (2, 0), (2, 1), (2, 2)])
def test_a_load_that_fails_on_one_rank_is_computed_again_on_all(monkeypatch, R, at):
    "The last rank's copy fails while the forward reads, in a layer of the target or the draft: nobody uses it"
    real_load, real_wait, gates, asked = Copies.load, Copies.wait_layer, {}, []
    def load(self, op, *args, **facts):
        gates[self.host.rank].loads.add(op)
        real_load(self, op, *args, **facts)
    def wait(self, op, layer, *args):
        if layer == at:
            asked.append(self.host.rank)
            gates[self.host.rank].asked.set()
        return real_wait(self, op, layer, *args)
    def copies(pool, host, **more):
        gates[host.rank] = Breaks(at, is_here=host.rank == R - 1)
        return Copies(pool, host, gate=gates[host.rank], **more)
    monkeypatch.setattr(Copies, "load", load)
    monkeypatch.setattr(Copies, "wait_layer", wait)
    monkeypatch.setattr("cpkv.tiers.Copies", copies)
    def rank(peers):
        engine = engine_of(peers.world())
        said = [serve(engine, i, p) for i, p in enumerate((A, B, LATER))]
        return said, dict(engine.tiers.cache.counters), close(engine)
    if at == 2: monkeypatch.setattr("cpkv.tiers.DeviceAndHost.verdict", _asked_for_the_draft(gates))
    got = run_ranks(rank, R, backend="local")
    assert all(n["failed_loads"] == 1 and leaked == 0 for _, n, leaked in got)
    for i, prompt in enumerate((A, B, LATER)): assert same(prompt, [said[i] for said, *_ in got])

def _asked_for_the_draft(gates):
    "The verdict waits for the draft's layer, which no layer of the target has asked for"
    real = DeviceAndHost.verdict
    def verdict(self, ops):
        for gate in gates.values(): gate.asked.set()
        return real(self, ops)
    return verdict

@pytest.mark.parametrize("R", [1, 2])
def test_a_scheduler_requeues_whoever_joined_a_load(R):
    "Many prompts over few pages, with hits in both tiers: each says what it says alone"
    prompts = [A, B, LATER, np.append(B, TEXT[310:317]), A, TEXT[200:260]]
    def rank(peers):
        s = Scheduler(engine_of(peers.world(), tokens=112))
        out = {}
        for i, p in enumerate(prompts):
            s.submit(i, p, Want(max_new_tokens=4))
            if i % 2: out |= s.run()
        host = sum(out[i].cached_host for i in out)
        return {i: run.output for i, run in out.items()}, host, close(s.engine)
    for out, host, leaked in run_ranks(rank, R, backend="local"):
        assert leaked == 0 and host > 0 and len(out) == len(prompts)
        for i, p in enumerate(prompts): assert out[i] == cold(np.ascontiguousarray(p, np.int64).tobytes())[0]

@settings(max_examples=settings().max_examples // 4)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(9, 80)), min_size=3, max_size=7), st.sampled_from([1, 2, 4, 8]),
       st.sampled_from(["write_through", "write_back"]), st.sampled_from([3, 40]), st.sampled_from([96, 96, 200, 512]))
def test_any_conversation_keeps_the_law_of_holders_and_the_bytes(turns, R, policy, host_pages, tokens):
    "Requests over three texts, a device of 12 to 64 pages, a host of few pages or many"
    prompts = [np.roll(TEXT, 100 * text)[:n] for text, n in turns]
    def rank(peers):
        page = engine_of(Solo(), host=0).pool.page_bytes()
        return talk(peers, prompts, host=(host_pages + 1) * page, policy=policy, tokens=tokens)
    got = run_ranks(rank, R, backend="local")
    for i, prompt in enumerate(prompts): assert same(prompt, [said[i] for said, _, _ in got])
    assert all(leaked == 0 and n["host_used_bytes"] <= n["host_budget_bytes"] for _, n, leaked in got)

def test_one_budget_holds_target_and_draft():
    with_draft, alone = engine_of(Solo(), host=1 << 18), engine_of(Solo(), host=1 << 18, drafting=False)
    a, b = with_draft.tiers.host, alone.tiers.host
    assert a.host_bytes == b.host_bytes and a.local_pages < b.local_pages
    for h in (a, b): assert h.local_pages * h.page_bytes <= 1 << 18 < (h.local_pages + 1) * h.page_bytes
    for engine in (with_draft, alone): engine.close()

def test_refusals():
    with pytest.raises(ConfigError, match="every layer of a page"):
        run_ranks(lambda peers: engine_of(peers.world(), reader="layer_split", placement="cyclic"), 2, backend="local")
    with pytest.raises(Exception, match="(?i)budget|below"): engine_of(Solo(), host=10)
    for host in (0, 1 << 22):
        with pytest.raises(InputError, match="policy"): engine_of(Solo(), host=host, policy="sometimes")
        with pytest.raises(InputError, match="after_hits"): engine_of(Solo(), host=host, after_hits=0)
    with pytest.raises(InputError, match="host_bytes"): engine_of(Solo(), host=-1)

def test_a_step_is_one_vector_on_the_control_lane():
    "Two numbers and eight, also while nothing is queued; nothing else but the verdict of a forward that joined a load"
    def rank(peers):
        engine = engine_of(peers.world())
        mark = engine.world.ledger.mark()
        for _ in range(3): engine.tick()
        idle = [e.op for e in engine.world.ledger.since(mark).entries if e.lane == "control"]
        mark, steps = engine.world.ledger.mark(), 0
        r = engine.begin(0, A)
        while engine.step(r) is None: steps += 1
        busy = [e.op for e in engine.world.ledger.since(mark).entries if e.lane == "control"]
        engine.finish(r)
        return idle, busy, steps, close(engine)
    for idle, busy, steps, leaked in run_ranks(rank, 2, backend="local"):
        assert idle == ["agreed_min"] * 3 and busy == ["agreed_min"] * (steps + 1) and leaked == 0

@pytest.mark.parametrize("R", [1, 2])
def test_under_debug_a_byte_that_changed_on_the_host_is_not_loaded(R):
    "Its page and what stands on it are computed again, on all ranks, and it is counted"
    def rank(peers):
        engine = engine_of(peers.world())
        said = [serve(engine, i, p) for i, p in enumerate((A, B))]
        engine.tiers.finish()
        host, match = engine.tiers.host, engine.tree.match(engine.tree.reusable(LATER))
        if len(at := host.mine(match.host_pages)) and peers.rank == R - 1: host.buffers[-1].pages[at[0], 3] ^= 1
        said.append(serve(engine, 2, LATER))
        return said, dict(engine.tiers.cache.counters), len(match.host_pages), close(engine)
    got = run_ranks(rank, R, backend="local", debug=True)
    assert all(n["failed_loads"] == 1 and had > 0 and leaked == 0 for _, n, had, leaked in got)
    for i, prompt in enumerate((A, B, LATER)): assert same(prompt, [said[i] for said, *_ in got])


# -- uses: what counts, and when

def one(n=1, **more): return Want(max_new_tokens=n, **more)

def alone(engine, prompts, n=1):
    "One after the other through a scheduler; their runs"
    s, out = Scheduler(engine), []
    for i, prompt in enumerate(prompts):
        out.append(s.submit(i, prompt, one(n)))
        s.run()
        engine.tiers.finish()
    return out

def test_a_request_that_waits_for_room_has_used_nothing_yet():
    engine = engine_of(Solo())
    alone(engine, [TEXT[:25]])
    s, counters = Scheduler(engine), engine.tiers.cache.counters
    s.submit(1, TEXT[200:240], one(30))             # decodes for thirty steps, and holds the room
    s.step()
    s.submit(2, np.append(TEXT[:25], TEXT[300:350]), one())
    steps = 0
    while s.waiting:
        s.step()
        steps += 1
    s.run()
    first = engine.tree.match(engine.tree.key(TEXT[:25])).path[0]
    assert steps > 5 and first.hits == 2 and counters["hit_device"] == 3
    assert close(engine) == 0

def test_a_prompt_is_one_use_of_its_prefix_however_long_it_decodes():
    engine = engine_of(Solo(), tokens=256, after_hits=2)
    alone(engine, [TEXT[:17]], n=40)
    assert {n.hits for n in engine.tree.nodes()} == {1}
    assert engine.tiers.numbers()["host_written_pages"] == 0 and close(engine) == 0

@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_prefix_is_written_at_its_nth_use_also_if_nothing_new_is_published(after):
    engine, written = engine_of(Solo(), tokens=256, after_hits=after), []
    for i in range(6):
        serve(engine, i, TEXT[:20], num=1)
        engine.tiers.finish()
        written.append(engine.tiers.numbers()["host_written_pages"])
    assert written == [2 * (i + 1 >= after) for i in range(6)] and close(engine) == 0

@pytest.mark.parametrize("why", ["no room", "broken", "evicted"])
def test_what_was_not_written_is_tried_again_at_the_next_use(why, gates, monkeypatch):
    engine = engine_of(Solo(), tokens=256)
    cache = engine.tiers.cache
    if why == "no room":
        with monkeypatch.context() as m:
            m.setattr(cache, "_host_room", lambda *args: False)
            serve(engine, 0, TEXT[:20], num=1)
    else:
        if why == "broken": gates[0].fail(OSError("broken"), 0)
        serve(engine, 0, TEXT[:20], num=1)
        engine.tiers.finish()
        if why == "evicted": engine.tiers.host.drop(engine.tree.evict(99, Tier.HOST))
    assert engine.tree.num_ready == [2, 0]
    serve(engine, 1, TEXT[:20], num=1)
    engine.tiers.finish()
    assert engine.tree.num_ready == [2, 2] and close(engine) == 0

def test_a_deferred_write_begins_however_the_one_before_it_ended(gates):
    engine = engine_of(Solo(), tokens=256)
    gates[0].hold(0)
    serve(engine, 0, TEXT[:33], num=1)
    serve(engine, 1, TEXT[:65], num=1)              # hangs under the first
    assert len(engine.tiers.cache._later) == 1
    gates[0].open(0)
    engine.tiers.finish()                           # no step of anybody ended it
    engine.tick()
    engine.tiers.finish()
    assert engine.tree.num_ready == [8, 8] and close(engine) == 0


# -- what failed leaves nothing, and says no more than the truth

def evicted(engine, prompt):
    "A prompt that the host alone has; the operation that will load it"
    alone(engine, [prompt])
    engine.alloc.free(engine.tree.evict(99), Holder.TREE)
    return engine.tiers.cache.ops.next_op

@pytest.mark.parametrize("R", [1, 2])
def test_a_load_that_failed_before_its_requests_run_sends_them_back(R, gates):
    "Its pages are somebody else's by then, and no plan may be made of them"
    def rank(peers):
        engine = engine_of(peers.world(), tokens=256, chunk=8)
        op = evicted(engine, TEXT[:65])
        if peers.rank == 0: gates[0].fail(OSError("broken"), op)
        s = Scheduler(engine)
        s.submit(1, TEXT[300:332], one())           # takes all of each step
        late = s.submit(2, TEXT[:70], one())        # joins the load, and is not computed yet
        s.step()
        engine.tiers.finish()
        done = s.run()
        assert not engine.tiers.failed_ops and not engine.tiers.joined
        return late.restarted, late.retracted, late.cached, late.cached_host, done[2].output, close(engine)
    for restarted, retracted, cached, cached_host, output, leaked in run_ranks(rank, R, backend="local"):
        assert (restarted, retracted, cached, cached_host, leaked) == (1, 0, 0, 0, 0)
        assert output == cold(np.ascontiguousarray(TEXT[:70], np.int64).tobytes())[0][:1]

def test_a_prefill_starts_again_if_its_load_had_failed_before(gates):
    engine = engine_of(Solo(), tokens=256)
    gates[0].fail(OSError("broken"), evicted(engine, TEXT[:65]))
    r = engine.begin(1, TEXT[:70])
    engine.tiers.finish()
    other = engine.begin(2, TEXT[100:164])          # gets the pages
    engine.prefill(other)
    assert greedy(engine.prefill(r)) == cold(np.ascontiguousarray(TEXT[:70], np.int64).tobytes())[0][0]
    assert (r.cached, engine.tiers.cache.counters["hit_host"]) == (0, 0)
    for x in (r, other): engine.finish(x)
    assert close(engine) == 0

def malformed(engine, prompt):
    "The last host page of a prompt loses the stamp of its payload"
    alone(engine, [prompt])
    host = engine.tiers.host
    host._written[host.mine(engine.tree.pages(Tier.HOST))[-1]] = 5

def test_a_refused_write_costs_nobody_a_page_a_lease_or_a_token():
    page = engine_of(Solo(), host=0).pool.page_bytes()
    engine = engine_of(Solo(), tokens=256, host=9 * page, chunk=200)
    malformed(engine, TEXT[:65])                    # eight pages: the host is full
    s = Scheduler(engine)
    runs = [s.submit(i, TEXT[100 * i:100 * i + 65], one(2)) for i in (1, 2)]
    with pytest.raises(ResidencyError, match="another payload"):
        while True: s.step()
    assert [len(run.output) for run in runs] == [1, 1]
    engine.check()
    for i in (1, 2): s.abort(i)
    assert not s.running and engine.tree.num_locked == 0 and not sum(engine.alloc.count(Holder.REQUEST))
    engine.close()

def test_after_a_refusal_all_goes_on_and_nobody_says_more_than_was_asked():
    page = engine_of(Solo(), host=0).pool.page_bytes()
    engine = engine_of(Solo(), tokens=256, host=9 * page, chunk=200)
    malformed(engine, TEXT[:65])
    s = Scheduler(engine)
    runs = [s.submit(i, TEXT[100 * i:100 * i + 65], one(i)) for i in (1, 2)]  # the first ends with its refusal
    with pytest.raises(ResidencyError): s.step()
    engine.tiers.host.mark_written(engine.tree.pages(Tier.HOST))
    done, steps = {}, 0
    while (s.waiting or s.running) and steps < 9:
        done |= {run.r.request: run.output for run in s.step()}
        steps += 1
    for i, run in zip((1, 2), runs):
        prompt = np.ascontiguousarray(TEXT[100 * i:100 * i + 65], np.int64)
        assert done[i] == run.output == cold(prompt.tobytes())[0][:i]
    assert not s.known and close(engine) == 0

def test_a_refused_begin_leaves_no_lease():
    engine = engine_of(Solo(), tokens=256)
    malformed(engine, TEXT[:65])
    engine.alloc.free(engine.tree.evict(4), Holder.TREE)
    with pytest.raises(ResidencyError) as e: engine.begin(1, TEXT[:65])
    assert engine.tree.num_locked == 0 and e.value.facts["rank"] == 0   # now, and not when the error goes
    engine.close()

@pytest.fixture
def threads():
    "Names of copy threads that began since"
    before = threading.enumerate()
    return lambda: [t.name for t in threading.enumerate() if t.name.startswith("cpkv-") and t not in before]

def test_an_engine_that_is_refused_leaves_no_thread(monkeypatch, threads):
    def unlike(peers): engine_of(peers.world(), after_hits=1 + peers.rank)
    with pytest.raises(ConfigError, match="after_hits is 1 on rank 0, 2 on rank 1"):
        run_ranks(unlike, 2, backend="local")
    def full(*args): raise MemoryError
    monkeypatch.setattr("cpkv.engine.Scratch", full)
    with pytest.raises(MemoryError): engine_of(Solo())
    assert threads() == []

def test_a_thread_that_does_not_end_keeps_no_other_alive(gates, threads):
    engine = engine_of(Solo())
    gates[0].hold(0)
    serve(engine, 0, TEXT[:65], num=1)
    engine.tiers.copies.timeout = 0.1
    with pytest.raises(WaitTimeout, match="cpkv-write-rank0"): engine.close()
    assert [name for name in threads() if "load" in name] == []
    gates[0].open(0)
    engine.close()
    assert threads() == []


# -- choices reach the cache

def test_the_engine_s_choices_reach_tree_and_host():
    engine = engine_of(Solo(), eviction="priority", host_form="page_first")
    assert engine.tiers.host.form == "page_first"
    s = Scheduler(engine)
    for i, (at, priority) in enumerate(((0, 5), (100, 0))):
        s.submit(i, TEXT[at:at + 33], one(priority=priority))
        s.run()
    engine.tiers.finish()
    engine.alloc.free(engine.tree.evict(4), Holder.TREE)    # the older one is worth more
    assert [len(engine.tree.match(engine.tree.key(TEXT[at:at + 33])).pages) for at in (0, 100)] == [4, 0]
    assert close(engine) == 0

def test_other_models_and_formats_have_other_names_for_the_same_tokens():
    def name(**more):
        engine = engine_of(Solo(), host=0, **more)
        return engine.tree.key(TEXT[:9]).root
    names = [name(), name(drafting=False), name(format="fp32"), name(namespace="b")]
    assert len(set(names)) == 4 and name() == names[0]


# -- any traffic, with copies that break

class Breaking(Gate):
    "Some moves break, the same ones whenever the story is told"
    def __init__(self, seed, percent): self.seed, self.percent = seed, percent
    def step(self, op_id, layer, page):
        if zlib.crc32(f"{self.seed} {op_id} {layer}".encode()) % 100 < self.percent: raise OSError("broken")

WAITS = st.lists(st.tuples(
    st.integers(0, 6), st.sampled_from([0, 0, 0, 150]), st.integers(1, 70), st.integers(0, 12),
    st.integers(1, 9)), min_size=1, max_size=6)     # comes at step, text, shared part, own part, tokens wanted

@settings(max_examples=settings().max_examples // 4)
@given(st.integers(1, 3), WAITS, st.sampled_from([0, 3, 15]), st.integers(0, 99), st.sampled_from(WRITES),
       st.integers(3, 12), st.lists(st.integers(0, 25), max_size=2), st.integers(1, 3))
def test_any_traffic_says_what_each_request_says_alone(R, waits, percent, seed, policy, pages, aborts, max_batch):
    "Arrivals, aborts, a small pool, a small host tier whose copies break: same tokens, equal ranks, nothing leaked"
    prompts = [np.append(TEXT[at:at + n], TEXT[300 + 20 * i:300 + 20 * i + own])
               for i, (_, at, n, own, _) in enumerate(waits)]
    host = (pages + 1) * engine_of(Solo(), host=0).pool.page_bytes()
    def rank(peers):
        engine = engine_of(peers.world(), host=host, policy=policy, max_batch=max_batch)
        s, out, step = Scheduler(engine), {}, 0
        while len(out) < len(prompts) and step < 600:
            for i, (at, *_, n) in enumerate(waits):
                if at == step: s.submit(i, prompts[i], one(n))
                if aborts.count(i) and at + 3 == step: s.abort(i)
            out |= {run.r.request: run.output for run in s.step()}
            engine.check()
            if step > max(at for at, *_ in waits) + 3 and not (s.waiting or s.running): break
            step += 1
        return out, step, close(engine)
    def copies(pool, host, **kw):
        return Copies(pool, host, gate=Breaking(f"{seed} {host.rank}", percent), **kw)
    with pytest.MonkeyPatch.context() as m:
        m.setattr("cpkv.tiers.Copies", copies)
        got = run_ranks(rank, R, backend="local", timeout=30)
    assert all(x == got[0] for x in got) and got[0][1] < 600 and got[0][2] == 0
    for i, output in got[0][0].items(): assert output == alone_tokens(prompts[i], waits[i][-1])
    assert set(range(len(waits))) - set(aborts) <= got[0][0].keys()

@cache
def _oracle(): return engine_of(Solo(), host=0, tokens=1024, reader="replicated")

def alone_tokens(prompt, n):
    "What a prompt says on one rank, with nothing known before"
    engine = _oracle()
    engine.alloc.free(engine.tree.evict(engine.tree.num_pages), Holder.TREE)
    return serve(engine, 0, prompt, num=n)[0]
