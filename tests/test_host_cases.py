"What public reports gave in about the host tier, through a whole engine; docs/field-cases.md is the map"
from functools import cache

import numpy as np
import pytest
import torch

from cpkv.alloc import Holder, PageAllocator
from cpkv.copies import Copies
from cpkv.engine import Engine, decode
from cpkv.handoff import page_digests, pool_facts, recv_pages, send_pages, send_plan
from cpkv.launch import run_ranks
from cpkv.laws import CapacityError, ConfigError, OrderError, WaitTimeout
from cpkv.layout import PageLayout
from cpkv.model import TINY, Model, parse_config, random_weights
from cpkv.mtp import Draft
from cpkv.nextn import NextN, random_nextn
from cpkv.nodes import Tier
from cpkv.ops.table import REF
from cpkv.radix import RadixTree
from cpkv.request import EngineConfig, greedy
from cpkv.schedule import Scheduler, Want
from cpkv.tiers import RESERVE_BYTES, DeviceAndHost, HostConfig, LoadFailed
from cpkv.world import Solo

TEXT = np.random.default_rng(7).integers(1, 256, 700)


@cache
def models(layers=1):
    config = parse_config(TINY, layers=layers)
    model = Model(config, random_weights(config, 1), REF)
    return model, Draft(NextN(model, random_nextn(config, 1)))

def engine_of(world, P=4, tokens=128, host_pages=64, drafting=True, layers=1, **more) -> Engine:
    "Host pages are those of a rank, its sink left out"
    model, draft = models(layers)
    sizes = dict(page_size=P, chunk=1000, device_tokens=tokens, max_tokens=tokens, format="fp32") | more
    def make(host): return Engine(world, model, EngineConfig(host_bytes=host, **sizes),
                                  draft=draft if drafting else None)
    if not host_pages: return make(0)
    engine = make((host_pages + 1) * page_bytes(P, drafting, layers))
    engine.pool.poison(range(engine.pool.local_pages))  # what nobody wrote is NaN
    return engine

@cache
def page_bytes(P, drafting, layers): return engine_of(Solo(), P, P, 0, drafting, layers).pool.page_bytes()

def local(fn, ranks, *args, **kw): return run_ranks(fn, ranks, *args, backend="local", timeout=30, **kw)

def pages_of(engine, r, n) -> dict:
    "Bytes of this rank's of the first `n` pages of a request, by place and buffer"
    lay, mine = engine.layout, engine.tiers.host.rank if engine.config.host_bytes else engine.world.rank
    return {(j, i): b.pages[lay.local_page_of(p)].clone() for j, p in enumerate(r.pages[:n].tolist())
            if lay.owner_of_page(p) == mine for i, b in enumerate(engine.pool.buffers) if len(b.pages)}

def equal(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def store(engine, tokens, request=900):
    "Compute a prompt and copy it; its logits, and the bytes of the pages that were published"
    r = engine.begin(request, tokens)
    logits = engine.prefill(r)
    said = logits, pages_of(engine, r, engine.tree.key(tokens).num_pages)
    engine.finish(r)
    engine.tiers.finish()
    return said

def cool(engine, n=None):
    "The device gives up its last pages, or all; what was in them is poison"
    pages = engine.tree.evict(engine.tree.num_pages if n is None else n)
    engine.alloc.free(pages, Holder.TREE)
    engine.pool.poison(engine.layout.local_page_of(p) for p in pages.tolist()
                       if engine.layout.owner_of_page(p) == engine.tiers.host.rank)
    return len(pages)

def damage(engine, tokens, place, part):
    "One bit of one part of a page on the host, at the rank that has it"
    host = engine.tiers.host
    page = engine.tree.match(engine.tree.reusable(tokens)).host_pages[place:place + 1]
    for b in host.buffers:
        if len(b.pages) and host.payload.part_of(b) == part: b.pages[host.mine(page), 0] ^= 1

@cache
def cold_of(key, P):
    tokens = np.frombuffer(key, np.int64)
    engine = engine_of(Solo(), P, 512, 0)
    return engine.prefill(engine.begin(0, tokens))

def is_cold(logits, tokens, P=4): return torch.equal(logits, cold_of(np.asarray(tokens, np.int64).tobytes(), P))

def close(engine):
    leaked = engine.leaked_pages()
    engine.close()
    return leaked

@pytest.fixture
def checked(monkeypatch):
    "Copies keep digests"
    monkeypatch.setattr("cpkv.tiers.Copies", lambda *args, **kw: Copies(*args, **kw | dict(checksums=True)))


# -- 9, 22, 71, 72 and traps 48, 50: what is restored, and how far


HOLES = {  # pages stored; what is bad of them; pages that are of use
    "9": (6, [("target index", 2), ("draft latent", 4), ("draft latent", 5)], 2),
    "9-draft-first": (6, [("target index", 5), ("draft index", 1)], 1),
    "71": (5, [("target latent", 2)], 2), "first": (3, [("draft latent", 0)], 0), "last": (3, [("draft index", 2)], 2)}

def with_holes(peers, name):
    n, bad, good = HOLES[name]
    engine, tokens = engine_of(peers.world()), TEXT[:4 * n + 3]
    store(engine, tokens)
    cool(engine)
    for part, place in bad: damage(engine, tokens, place, part)
    before = engine.alloc.free_by_class
    r = engine.begin(1, tokens)
    assert r.cached == r.cached_host == 4 * n  # what was promised
    with pytest.raises(LoadFailed): engine.step(r)
    engine.abort(r)
    assert engine.alloc.free_by_class == before and not sum(engine.alloc.count(Holder.TRANSFER))
    engine.reuse(r)
    found, logits = (r.cached, r.cached_host), engine.prefill(r)
    engine.finish(r)
    engine.check()
    counters = engine.tiers.cache.counters
    return found, (counters["failed_loads"], counters["hit_host"], counters["loaded"]), logits, close(engine)

@pytest.mark.parametrize("R", [1, 2, 4])
@pytest.mark.parametrize("name", HOLES)
def test_a_prefix_with_holes_ends_at_the_first_for_all_parts_and_ranks(checked, name, R):
    "Reports 9 and 71: of six pages with flags 1 1 0 1 1 1 two are of use, a load that brings fewer is cut on all ranks"
    n, _, good = HOLES[name]
    for found, counted, logits, leaked in local(with_holes, R, name):
        assert found == (4 * good, 4 * good) and counted == (1, good, good) and leaked == 0
        assert is_cold(logits, TEXT[:4 * n + 3])

def joined_by_two(peers):
    engine, shared = engine_of(peers.world(), P=1, tokens=400, host_pages=256), TEXT[:160]
    store(engine, np.append(shared, 7))
    cool(engine)
    for place in range(87, 160): damage(engine, np.append(shared, 7), place, "target latent")
    asked = [np.append(shared, tail) for tail in ([7, 8], [7, 9, 10])]
    rs = [engine.begin(i, tokens) for i, tokens in enumerate(asked)]
    assert rs[0].loads == rs[1].loads and [r.cached_host for r in rs] == [160, 160]
    with pytest.raises(LoadFailed) as e: engine.compute([(r, len(r.tokens)) for r in rs])
    for r in rs:
        engine.abort(r)
        engine.reuse(r)
    found = [r.cached_host for r in rs]
    out = [c.logits for c in engine.compute([(r, len(r.tokens)) for r in rs])]
    for r in rs: engine.finish(r)
    engine.check()
    return e.value.facts["requests"], found, out, asked, close(engine)

@pytest.mark.parametrize("R", [1, 2])
def test_who_joined_a_load_whose_tail_fails_goes_on_from_what_is_good(checked, R):
    "Report 22: 160 pages on their way for two requests, the last 73 fail"
    for named, found, out, asked, leaked in local(joined_by_two, R):
        assert named == [0, 1] and found == [87, 87] and leaked == 0
        assert all(is_cold(x, tokens, P=1) for x, tokens in zip(out, asked))

def restored(peers):
    engine, out = engine_of(peers.world(), P=1, tokens=320, host_pages=320), []
    for n in (1, 64, 113, 127, 128, 129, 300):
        tokens = np.roll(TEXT, n)[:n + 1]
        logits, before = store(engine, tokens)
        cool(engine)
        r = engine.begin(n, tokens)
        found, again = (r.cached, r.cached_host), engine.prefill(r)
        out.append((n, found, torch.equal(logits, again) and equal(pages_of(engine, r, n), before)))
        engine.abort(r)
    return out, close(engine)

@pytest.mark.parametrize("R", [1, 2])
def test_a_restored_prefix_has_its_bytes_at_every_length(R):
    "Report 72"
    for out, leaked in local(restored, R): assert all(found == (n, n) and same for n, found, same in out) and leaked == 0

def two_tiers(peers):
    engine, tokens, out = engine_of(peers.world()), TEXT[:4 * 6 + 2], []
    logits, before = store(engine, tokens)
    for k in range(7):
        assert cool(engine, k) == k
        r = engine.begin(k, tokens)
        found, again = (r.cached, r.cached_host), engine.prefill(r)
        out.append((found, torch.equal(logits, again) and equal(pages_of(engine, r, 6), before)))
        engine.abort(r)
    return out, close(engine)

@pytest.mark.parametrize("R", [1, 3])
def test_a_prefix_of_two_tiers_is_put_together_at_every_boundary(R):
    "Trap 50: the device has the first pages, the host the rest"
    for out, leaked in local(two_tiers, R): assert out == [((24, 4 * k), True) for k in range(7)] and leaked == 0


# -- 12, 13, 55: ranks


def five_waiting(peers, what):
    "Five prompts, all on the host, over a pool that does not hold them together"
    engine, me = engine_of(peers.world(), P=1, tokens=32, host_pages=64, chunk=16), peers.rank
    try:
        for i in range(5):
            store(engine, TEXT[20 * i:20 * i + 7], 900 + i)
            cool(engine)
        s, seen, real = Scheduler(engine), [], engine.run
        def spy(ready, *more):
            seen.append([(r.request, stop) for r, stop in ready.batch])
            return real(ready, *more)
        engine.run = spy
        if what == "free": engine.alloc.take([[0, 1] * (13 - 2 * me)])  # 6 pages are free on rank 0, 10 on rank 1
        for i in (range(5) if what != "order" or me == 0 else range(4, -1, -1)):
            s.submit(i, TEXT[20 * i:20 * i + 8], Want(max_new_tokens=2))
        if what == "id" and me: s.abort(3)
        out = s.run()
        return seen, [out[i].cached_host for i in range(5)], engine.leaked_pages()
    finally: engine.close()

@pytest.mark.parametrize("what", ["free", "id", "order"])
def test_ranks_that_differ_under_loads_are_named_and_nobody_hangs(what):
    "Report 13 with load-backs on their way: another free count, an id that one rank does not know, another order"
    with pytest.raises(OrderError): local(five_waiting, 2, what)

def test_ranks_with_equal_numbers_admit_alike_under_loads():
    (a, hits, leaked), other = local(five_waiting, 2, "")
    assert (a, hits, leaked) == other and leaked == 0 and hits == [6] * 5

def on_one_machine(peers, lacks):
    "Eight ranks, memory for exactly their pools, or a byte less"
    world, engine = peers.world(), engine_of(Solo(), host_pages=0)
    asked = 20 * engine.pool.page_bytes()
    def probe(): return RESERVE_BYTES + peers.size * asked - lacks
    tree = RadixTree(4, namespace="memory", pairs=True)
    layout = PageLayout(cp_size=1, page_size=4)
    parts = world, tree, PageAllocator(layout, engine.pool.local_pages), engine.pool, 1, HostConfig(host_bytes=asked)
    try: tiers = DeviceAndHost(*parts, probe=probe)
    except CapacityError as e: return {k: e.facts[k] for k in ("request_bytes", "free_bytes", "reserve_bytes", "ranks_on_host")}
    tiers.close()
    return asked

@pytest.mark.parametrize("seed", range(3))
def test_ranks_of_one_machine_divide_its_memory_once(seed):
    "Report 55: in any order of arrival all eight are accepted, with a byte less none is, and is told the four numbers"
    asked = local(on_one_machine, 8, 0, seed=seed)
    assert asked == asked[:1] * 8
    want = dict(request_bytes=asked[0], free_bytes=RESERVE_BYTES + 8 * asked[0] - 1, reserve_bytes=RESERVE_BYTES, ranks_on_host=8)
    assert local(on_one_machine, 8, 1, seed=seed) == [want] * 8


# -- 37 and trap 42: who reads a page while a copy does


def test_a_slow_copy_reads_what_was_computed_whoever_wants_its_pages(gates):
    "Report 37: the pages of a prompt whose write stands still are given to nobody"
    engine = engine_of(Solo(), tokens=32, host_pages=16)
    gate, tokens, other = gates[0], TEXT[:21], TEXT[100:131]
    gate.hold(0)
    r = engine.begin(0, tokens)
    logits = engine.prefill(r)
    want = pages_of(engine, r, 5)
    engine.finish(r)
    engine.tiers.copies.timeout = .05
    asks = engine.begin(1, other)
    with pytest.raises(WaitTimeout): engine.prefill(asks)  # all eight pages are asked for
    [node] = engine.tree.nodes()
    now = {(j, i): b.pages[engine.layout.local_page_of(p)] for j, p in enumerate(node.pages[Tier.DEVICE].tolist())
           for i, b in enumerate(engine.pool.buffers) if len(b.pages)}
    assert equal(now, want)
    gate.open(0)
    engine.tiers.copies.timeout = 10
    assert is_cold(engine.prefill(asks), other)
    engine.abort(asks)
    again = engine.begin(2, tokens)
    assert again.cached_host > 0 and torch.equal(engine.prefill(again), logits)
    assert equal(pages_of(engine, again, 5), want)
    engine.abort(again)
    assert close(engine) == 0

@pytest.mark.parametrize("room,found", [(48, 20), (40, 0)], ids=["room", "no-room"])
def test_a_load_fills_no_page_that_a_request_still_reads(gates, room, found):
    "Report 37, the other way: a slow reader keeps its bytes, with room for the load beside it and without"
    engine, tokens, slow = engine_of(Solo(), tokens=room), TEXT[:21], TEXT[100:125]
    store(engine, tokens)
    cool(engine)
    reader = engine.begin(1, slow)
    engine.compute([(reader, 24)])
    before, op = pages_of(engine, reader, 6), engine.tiers.cache.ops.next_op
    gates[0].hold(op)
    r = engine.begin(2, tokens)
    assert r.cached_host == found and not np.isin(r.pages, reader.pages).any()
    gates[0].open(op)
    engine.tiers.finish()
    assert equal(pages_of(engine, reader, 6), before) and is_cold(engine.prefill(reader), slow)
    engine.abort(reader)
    assert is_cold(engine.prefill(r), tokens)
    engine.abort(r)
    assert close(engine) == 0


# -- 41: requests that leave


WAYS = ["before it moves", "moved, not seen", "ended", "failed", "computed"]

def leave(peers, gates):
    engine, tokens = engine_of(peers.world(), host_pages=16), TEXT[:18]
    gate, copies, cache = gates[engine.tiers.host.rank], engine.tiers.copies, engine.tiers.cache
    for i in range(20):
        way = WAYS[i % len(WAYS)]
        store(engine, tokens)
        cool(engine)
        op = cache.ops.next_op
        if way == "before it moves": gate.hold(op)
        if way == "failed": gate.fail(OSError("broken"), op)
        r = engine.begin(i, tokens)
        assert r.cached_host == 16 and r.loads == (op,)
        if way in ("moved, not seen", "ended"): copies.wait_op(op)
        if way == "ended": engine.tick()
        if way == "computed": engine.prefill(r)
        for _ in range(2): engine.abort(r)
        gate.open(op)
        engine.tiers.finish()
        engine.tick()
        engine.check()
        assert not sum(engine.alloc.count(Holder.REQUEST)) and not engine.tree.num_locked
    leaked = engine.leaked_pages()
    free = engine.tiers.host.alloc.free_by_class
    engine.close()
    return leaked, free

@pytest.mark.parametrize("R", [1, 2])
def test_whichever_way_a_request_leaves_its_host_pages_are_whole_again(gates, R):
    "Report 41: a host of 16 pages, twenty requests for four of them"
    assert local(leave, R, gates) == [(0, [16] * R)] * R

def leave_the_queue(peers):
    "Two are admitted, the second for its load alone: the first takes the whole step; then it leaves"
    engine = engine_of(peers.world(), chunk=8, host_pages=16)
    store(engine, TEXT[:18])
    cool(engine)
    s = Scheduler(engine)
    s.submit(0, TEXT[100:140], Want(max_new_tokens=1))
    run = s.submit(1, TEXT[:18], Want(max_new_tokens=1))
    s.submit(2, TEXT[:18], Want(max_new_tokens=1))
    s.abort(2)
    s.step()
    found = run.r.cached_host
    for _ in range(2): s.abort(1)
    out = s.run()
    return found, sorted(out), close(engine)

def test_an_abort_in_the_queue_and_under_a_load_leaves_no_page():
    assert local(leave_the_queue, 2) == [(16, [0], 0)] * 2


# -- 62, 84, 92: what is told


def test_a_hit_of_two_tiers_is_told_once_a_request_and_without_a_rest():
    "Report 62: a hundred prompts of three chunks after two pages on the device and two on the host"
    engine = engine_of(Solo(), chunk=8, tokens=64)
    s, cache, rng = Scheduler(engine), engine.tiers.cache, np.random.default_rng(0)
    store(engine, TEXT[:17])
    one, computed, steps, real = Want(max_new_tokens=1), [0], [0], engine.run
    def spy(ready, *more):
        computed[0] += sum(stop - r.computed for r, stop in ready.batch)
        steps[0] += 1
        return real(ready, *more)
    for i in range(100):
        engine.tiers.finish()
        cool(engine)
        s.submit(1000 + i, TEXT[:10], one)  # brings two pages to the device
        s.run()
        before = {k: cache.counters[k] for k in ("hit_device", "hit_host")}
        engine.run = spy
        run = s.submit(i, np.concatenate([TEXT[:17], rng.integers(1, 256, 23)]), one)
        s.run()
        engine.run = real
        assert (run.cached, run.cached_host) == (16, 8)
        assert {k: cache.counters[k] - n for k, n in before.items()} == dict(hit_device=2, hit_host=2)
    assert steps[0] == 300 and computed[0] + 100 * 16 == 100 * 40
    assert close(engine) == 0

def turns(peers, drafting, tokens, host_pages):
    "Two conversations in turn; hits of each turn"
    engine = engine_of(peers.world(), tokens=tokens, drafting=drafting, host_pages=host_pages)
    texts, hits = [TEXT[:6], TEXT[300:306]], []
    for turn in range(6):
        for i in (0, 1):
            r = engine.begin(2 * turn + i, texts[i])
            hits.append(r.cached)
            said, _ = decode(engine, r, greedy(engine.prefill(r)), 4)
            engine.finish(r)
            texts[i] = np.concatenate([r.tokens, said[-1:], TEXT[350 + 10 * turn:361 + 10 * turn]])
    return hits, len(texts[0]), close(engine)

@pytest.mark.parametrize("R", [2])
@pytest.mark.parametrize("tokens,host_pages", [(232, 0), (116, 64)], ids=["device", "host"])
def test_a_draft_costs_a_page_of_a_hit_a_turn_at_most(R, tokens, host_pages):
    "Report 92: room for 1.2 of both, or of one and the other on the host; what is reserved is left out"
    (drafted, most, a), (alone, _, b) = (local(turns, R, drafting, tokens, host_pages)[0] for drafting in (True, False))
    assert a == b == 0 and most == 96 and alone == sorted(alone) and alone[-2:] == [68, 68]
    assert len(drafted) == len(alone) == 12 and all(y - 4 <= x <= y for x, y in zip(drafted, alone))

def thrice(peers):
    s, hits = Scheduler(engine_of(peers.world())), []
    for i, n in enumerate((3, 4, 5, 8, 9)):
        for again in (0, 1):
            run = s.submit(2 * i + again, np.roll(TEXT, 20 * i)[:n], Want(max_new_tokens=1))
            s.run()
        hits.append(run.cached)
    return hits, close(s.engine)

def test_the_scheduler_drops_the_last_pair_once():
    "Reports 24 and 73, with a draft: a prompt that comes again hits all whole pages before its last token"
    assert local(thrice, 2) == [([0, 0, 4, 4, 8], 0)] * 2


# -- 30, 69, 70: the draft travels


def pass_on(peers, decode_drafts):
    "Two ranks prefill 21 tokens on pages of 8, a third goes on; all with a draft, or the third without"
    world = peers.world(2)
    engine = engine_of(world or Solo(), P=8, layers=3, host_pages=0, drafting=world is not None or decode_drafts)
    peers.check_start(pool_facts(engine.pool))
    names = [b.component for b in engine.pool.buffers]
    if world is None:
        got = recv_pages(peers, engine.pool, engine.alloc, range(2))
        r = engine.adopt(0, np.append(TEXT[:21], got.first_token), got.pages, 21)
        digests = page_digests(engine.pool, 0, got.pages, 21)
        return names, digests, engine.step(r)
    r = engine.begin(0, TEXT[:21])
    first = greedy(engine.prefill(r))
    send = send_plan(engine.layout, PageLayout(cp_size=1, page_size=8), r.pages)[peers.rank]
    send_pages(peers, engine.pool, send, 2, request=0, num_tokens=21, first_token=first, total_pages=3)
    return names, page_digests(engine.pool, peers.rank, r.pages, 21), first

def test_the_draft_travels_with_the_target():
    "Reports 30 and 70: three layers and a draft list four buffers of rows and four of the index, all three pages arrive"
    (names, a, first), (_, b, _), (there, got, logits) = local(pass_on, 3, True)
    assert names == there == ["latent"] * 4 + ["index"] * 4
    assert got == a | b and sorted(got) == [0, 1, 2]
    alone = engine_of(Solo(), P=8, layers=3, host_pages=0)
    r = alone.begin(0, TEXT[:21])
    assert greedy(alone.prefill(r)) == first and page_digests(alone.pool, 0, r.pages, 21) == got
    r.tokens = np.append(r.tokens, np.int32(first))
    assert torch.equal(alone.step(r), logits)

def test_a_side_without_the_draft_is_refused_by_name():
    "Reports 30 and 69: before the first byte"
    with pytest.raises(ConfigError, match="buffer.3 is latent 3 .* ranks 0 and 1, index 0 .* on rank 2"): local(pass_on, 3, False)
