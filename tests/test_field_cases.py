"""What public reports gave in, and the values that are right: docs/field-cases.md is the map"""
import itertools
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpkv.all_gather import ForwardPlan, owned_rows
from cpkv.alloc import Holder, PageAllocator, cyclic_classes
from cpkv.cli import make_parser, parse
from cpkv.compute_owner import SPLITTERS
from cpkv.engine import Engine, generate
from cpkv.handoff import pack_pages, page_digests, place_pages, recv_pages, send_pages, send_plan
from cpkv.launch import run_ranks
from cpkv.laws import CapacityError, ConfigError, InputError, OrderError, PageIdError
from cpkv.layout import PageLayout
from cpkv.ledger import LANES
from cpkv.model import TINY, Model, parse_config, random_weights
from cpkv.ops.table import REF
from cpkv.options import OPTIONS
from cpkv.page_split import page_split
from cpkv.pool import FORMATS, POISON, PayloadDims, Pool
from cpkv.reader import Reader, run_to_end
from cpkv.request import Computed, EngineConfig, greedy
from cpkv.schedule import Scheduler, Want
from cpkv.scratch import Scratch
from cpkv.shared_kv import (PROBE_DIMS, PROBE_LAYERS, READERS, probe_pages, probe_plan, probe_reader,
                            probe_steps)
from cpkv.split import Extend, SPLITS, interleave_split, zigzag_of, zigzag_split
from cpkv.world import Solo

ROOT = Path(__file__).parent.parent
CONFIG = parse_config(TINY, layers=2)
MODEL = Model(CONFIG, random_weights(CONFIG, seed=1), REF)
FLAT = Model(parse_config(TINY, layers=1), random_weights(parse_config(TINY, layers=1), seed=1), REF)
TEXT = np.random.default_rng(7).integers(1, 256, 320)  # no token is 0: that is what padding has
WAYS = [(reader, split) for reader in sorted(READERS) for split in sorted(SPLITTERS)]
every_way = pytest.mark.parametrize("reader,split", WAYS, ids=map("-".join, WAYS))
SOME = [(sorted(READERS)[i % len(READERS)], sorted(SPLITTERS)[i % len(SPLITTERS)])  # each reader, each split
        for i in range(max(len(READERS), len(SPLITTERS)))]
RULES = {"zigzag": lambda P: zigzag_split, "interleave": lambda P: interleave_split,  # of a page size
         "page": lambda P: lambda ext, R: page_split(ext, R, P, [9] * R)}
every_rule = pytest.mark.parametrize("rule", RULES)
every_reader = pytest.mark.parametrize("reader", sorted(READERS))


def local(fn, ranks, *args, **kw):
    return run_ranks(fn, ranks, *args, backend="local", timeout=30, **kw)

def engine_of(world, P=4, chunk=8, tokens=128, model=MODEL, format="fp32", **more):
    sizes = dict(page_size=P, chunk=chunk, device_tokens=tokens, max_tokens=tokens, format=format) | more
    owners = sizes.get("split", "page") == "page" and sizes.get("reader") != "replicated"
    engine = Engine(world, model, EngineConfig(placement="compute_owner" if owners else "cyclic", **sizes))
    engine.pool.poison(range(engine.pool.local_pages))  # what nobody wrote is NaN
    return engine

@cache
def cold(prompt: bytes, fmt: str = "fp32"):
    "Logits of the last token: one rank, whole cache, nothing known, one chunk"
    tokens = np.frombuffer(prompt, np.int64)
    engine = engine_of(Solo(), chunk=1000, tokens=512, format=fmt, reader="replicated")
    return engine.prefill(engine.begin(0, tokens))

def is_cold(logits, tokens, fmt="fp32"):
    return torch.equal(logits, cold(np.asarray(tokens, np.int64).tobytes(), fmt))

def boundary(P, R, chunk):
    return sorted({0, 1, P - 1, P, P + 1, 2 * P, R * P - 1, R * P, R * P + 1, 2 * R * P, chunk - 1, chunk,
                   chunk + 1})


# -- the boundary lengths, bare and after a page of history


def covers(split, R, P, batch):
    "Each new token is one row of one rank, and is stored once, at the loc of its page's owner"
    ext, lay = [Extend(request=i, start=a, stop=b) for i, (a, b) in enumerate(batch)], PageLayout(cp_size=R, page_size=P)
    pages = probe_pages([[(i, a, b) for i, (a, b) in enumerate(batch)]], lay)
    plans = [ForwardPlan(split=split(ext, R), page_tables=tuple(pages.values()), layout=lay, rank=r, owner=r,
                         tokens=tuple(np.arange(e.stop) for e in ext), samples=(True,) * len(ext)) for r in range(R)]
    want = [(e.request, p) for e in ext for p in range(e.start, e.stop)]
    most, buffer = plans[0].split.max_rows, {}
    for p in plans:
        rows = p.rows
        assert (rows.visible[:rows.num] == rows.position[:rows.num] + 1).all() and not rows.visible[rows.num:].any()
        buffer |= {p.rank * most + i: at for i, at in enumerate(zip(rows.index[:rows.num].tolist(), rows.position.tolist()))}
    assert sorted(buffer.values()) == want and [buffer[i] for i in plans[0].order.tolist()] == want
    stored = [(buffer[row], lay.slot_of(p.rank, loc)) for p in plans
              for row, loc in zip(*(x.tolist() for x in owned_rows(p)))]
    assert sorted(stored) == [((i, p), pages[i][p // P] * P + p % P) for i, p in want]

@every_rule
@pytest.mark.parametrize("R", [1, 2, 3, 8])
def test_plans_of_boundary_lengths(rule, R):
    for P, chunk in ((1, 3), (4, 10), (64, 96)):
        split = RULES[rule](P)
        for n in boundary(P, R, chunk):
            if n == 0: continue  # refused below
            for history in (0, P): covers(split, R, P, [(history, history + n)])
        covers(split, R, P, [(P * (i % 2), P * (i % 2) + n) for i, n in enumerate(boundary(P, R, chunk)) if n])

def lengths(peers, reader, split, P, chunk):
    world, R, sizes, out = peers.world(), peers.size, boundary(P, 3, chunk), []
    engine, wide = (engine_of(world, P, c, tokens=512, reader=reader, split=split) for c in (chunk, sum(sizes)))
    def ask(n, tokens):
        r = engine.begin(n, tokens)
        out.append((tokens, r.cached, engine.prefill(r)))
        engine.abort(r)
    for n in sizes[1:]: ask(n, TEXT[:n])
    rs = [wide.begin(n, TEXT[n:2 * n]) for n in sizes[1:]]
    got = wide.compute([(r, len(r.tokens)) for r in rs])
    out += [(r.tokens, 0, c.logits) for r, c in zip(rs, got)]
    for r in rs: wide.abort(r)
    seed = engine.begin(999, TEXT[:P + 1])
    engine.prefill(seed), engine.finish(seed)
    for n in sizes: ask(n, TEXT[:P + n])
    assert R == 1 or world.ledger.entries
    return out, engine.leaked_pages() + wide.leaked_pages()

@pytest.mark.parametrize("reader,split", SOME, ids=map("-".join, SOME))
def test_boundary_lengths_cold_after_a_page_and_in_one_batch(reader, split):
    P, chunk = 4, 10
    sizes = boundary(P, 3, chunk)
    assert sizes == [0, 1, 3, 4, 5, 8, 9, 10, 11, 12, 13, 24]
    for out, leaked in local(lengths, 3, reader, split, P, chunk):
        assert leaked == 0 and all(is_cold(logits, tokens) for tokens, _, logits in out)
        assert [c for _, c, _ in out] == [0] * (2 * len(sizes) - 2) + [P if n else 0 for n in sizes]

def empty(peers):
    world = peers.world()
    for make in (lambda: engine_of(world).begin(0, []), lambda: Scheduler(engine_of(world)).submit(0, []),
                 lambda: Extend(request=0, start=4, stop=4)):
        with pytest.raises(InputError): make()
    return world.ledger.entries

def test_no_tokens_are_refused_on_every_rank_before_a_collective():
    "Reports 60 and 28: nothing to compute is said, never computed"
    assert local(empty, 3) == [[], [], []]


# -- 10, 11, 28, 43, 44, 60 and traps 4, 5, 6, 26, 27: the reports' own batches through every reader


SMALL = {  # ranks, page size, batches of (request, start, stop)
    "10-five-and-nine": (2, 4, [[(0, 0, 5), (1, 0, 9)]]), "10-whole-pages": (2, 4, [[(0, 0, 20), (1, 0, 36)]]),
    "11-eight-after-four": (2, 4, [[(0, 0, 4)], [(0, 4, 12)]]),
    "28-five-alone": (8, 64, [[(0, 0, 5)]]), "28-five-and-a-hundred": (8, 64, [[(0, 0, 5), (1, 0, 100)]]),
    "28-one-after-63": (8, 64, [[(0, 0, 63)], [(0, 63, 64)]]), "43-ten-after-six": (4, 4, [[(0, 0, 6)], [(0, 6, 16)]]),
    "44-two-after-five": (2, 4, [[(0, 0, 5)], [(0, 5, 7)]]), "60-ten-over-three": (3, 4, [[(0, 0, 10)]]),
    "60-two-over-three": (3, 4, [[(0, 0, 2)]]), "trap-5-one-and-nine": (4, 4, [[(0, 0, 1), (1, 0, 9)]]),
    "trap-6-one-to-seven": (8, 4, [[(i, 0, i + 1) for i in range(7)]]),
    "trap-26-after-70": (2, 64, [[(0, 0, 70)], [(0, 70, 79)]]), "trap-27-one-page-of-history": (8, 4, [[(0, 0, 4)], [(0, 4, 10)]])}
SMALL |= {f"trap-4-after-{h}": (2, 64, [[(0, 0, h)], [(0, h, h + 9)]][h == 0:]) for h in (0, 1, 63, 64, 65)}

def said_by(R, kind, batches, P, split):
    got = local(probe_reader, R, kind, batches, "fp32", P, frozenset(), None, split)
    assert all(received == predicted for _, received, predicted in got)
    return {k: v for said, *_ in got for k, v in said.items()}, sum(len(said) for said, *_ in got)

@pytest.mark.parametrize("name", SMALL)
def test_small_batches_equal_one_rank_alone(name):
    R, P, batches = SMALL[name]
    stops = {q: b for batch in batches for q, _, b in batch}
    want = {}
    for q, n in stops.items(): want |= said_by(1, Reader, [[(q, 0, n)]], P, zigzag_split)[0]
    assert len(want) == len(PROBE_LAYERS) * sum(stops.values())
    turn = [*SMALL].index(name)  # every case sees each reader and each rule, all cases together each pair
    for reader, rule in zip(READERS, itertools.islice(itertools.cycle(RULES), turn % len(RULES), None)):
        got, count = said_by(R, READERS[reader], batches, P, RULES[rule](P))
        assert count == len(got) == len(want), (reader, rule)
        assert all(torch.equal(x, y) for k in want for x, y in zip(got[k], want[k])), (reader, rule)

@every_rule
def test_what_a_row_picks_moves_with_the_row(rule):
    "Report 11: with eight new tokens after four, rows see 5 to 12 keys; up to eight of them are picked"
    got, _ = said_by(2, READERS["full_view"], [[(0, 0, 4)], [(0, 4, 12)]], 4, RULES[rule](4))
    for position in range(12):
        picked = got[0, 0, position][0].tolist()
        kept, visible = [p for p in picked if p >= 0], position + 1
        assert kept == sorted(set(kept)) and len(kept) == min(visible, 8) and max(kept) < visible
        assert picked == kept + [-1] * (8 - len(kept))
        if visible <= 8: assert kept == list(range(visible))

def together(peers, split, lengths):
    engine = engine_of(peers.world(), P=4, chunk=1000, tokens=256, split=split)
    rs = [engine.begin(i, TEXT[i:i + n]) for i, n in enumerate(lengths)]
    got = engine.compute([(r, len(r.tokens)) for r in rs], captures=(True,) * len(rs))
    for r in rs: engine.abort(r)
    return [c.logits for c in got], [len(c.hidden) for c in got], engine.leaked_pages()

@pytest.mark.parametrize("split", sorted(SPLITS))
@pytest.mark.parametrize("R,sizes", [(2, (5, 9)), (2, (20, 36)), (8, (5, 100)), (4, (1, 1, 1)), (3, (2, 10))])
def test_a_batch_of_uneven_requests_through_the_model(split, R, sizes):
    "Reports 10, 28 and 60"
    for logits, rows, leaked in local(together, R, split, sizes):
        assert all(is_cold(x, TEXT[i:i + n]) for i, (x, n) in enumerate(zip(logits, sizes)))
        assert rows == list(sizes) and leaked == 0


# -- traps 1 and 2: segments of any length


@given(st.integers(1, 5), st.sampled_from([1, 4, 64]), st.data())
def test_segments_may_be_cut_anywhere(R, P, data):
    "Report 10 and trap 1: halves of a rank's rows are no segments, here none needs to be like another"
    batch, cuts = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        start, n = data.draw(st.integers(0, 2 * P)), data.draw(st.integers(1, 3 * P))
        inside = sorted(data.draw(st.lists(st.integers(start, start + n), min_size=2 * R - 1, max_size=2 * R - 1)))
        batch.append((start, start + n))
        cuts.append([start, *inside, start + n])
    covers(lambda ext, R: zigzag_of("cut", ext, np.array(cuts).T), R, P, batch)

def by_pages(P, *borders):
    return lambda ext, R: zigzag_of("pages", ext, P * np.array(borders)[:, None], aligned=True)

def test_the_rank_that_has_most_sets_the_size_of_a_gather():
    "Trap 2: nine pages on two ranks are three, two, two, two; half of the rows is not enough for rank 0"
    split = by_pages(64, 0, 3, 5, 7, 9)
    made = split([Extend(request=0, start=0, stop=576)], 2)
    assert made.rows_by_rank == (320, 256) and made.max_rows == 320 > 576 // 2
    covers(split, 2, 64, [(0, 576)])
    assert sorted(page_split([Extend(request=0, start=0, stop=576)], 2, 64, [9, 9]).rows_by_rank) == [256, 320]
    want, _ = said_by(1, Reader, [[(0, 0, 36)]], 4, zigzag_split)
    for kind in READERS.values():
        got, _ = said_by(2, kind, [[(0, 0, 36)]], 4, by_pages(4, 0, 3, 5, 7, 9))
        assert len(got) == len(want) and all(torch.equal(x, y) for k in want for x, y in zip(got[k], want[k]))


# -- trap 8, report 29, 64: padding


def padding_rows(peers, kind):
    "What a reader says of padding rows whose queries are NaN"
    world, batch = peers.world(), [(0, 0, 5)]
    lay = PageLayout(cp_size=kind.shards(world.size), page_size=4)
    pool = Pool(lay, has_index=(True,), dims=PROBE_DIMS, format=FORMATS["fp32"], local_pages=4)
    reader = kind(world, pool, REF, Scratch(1 << 16), index_topk=8, v_dim=12, scale=.25)
    plan = probe_plan(batch, probe_pages([batch], lay), lay, world.rank, world.size)
    T, n, session = len(plan.rows.index), plan.rows.num, reader.open(plan)
    def rows(*shape):
        x = torch.full((T, *shape), torch.nan)
        x[:n] = torch.randn(n, *shape)
        return x
    run_to_end(session.put(0, latent=rows(16), index=rows(8)))
    picked = run_to_end(session.select(0, rows(16, 8), rows(16)))
    state = run_to_end(session.attend(0, rows(2, 16), picked))
    session.end()
    return n, picked, state.out, state.lse

@every_reader
def test_padding_rows_pick_nothing_and_give_zeros(reader):
    "Trap 8, on ranks that hold a row and on ranks that hold none"
    got = local(padding_rows, 8, READERS[reader])
    assert [n for n, *_ in got] == [1] * 5 + [0] * 3
    for n, picked, out, lse in got:
        assert (picked[n:] == -1).all() and not out[n:].any() and (lse[n:] == -torch.inf).all()
        assert (picked[:n, 0] == 0).all() and out[:n].isfinite().all()


def second_batch(peers, kind, split):
    "Twelve tokens, then three in the same buffers: slots that changed, and are the sinks as they were"
    world, batches = peers.world(), [[(0, 0, 12)], [(0, 12, 15)]]
    lay = PageLayout(cp_size=kind.shards(world.size), page_size=4)
    pages = probe_pages(batches, lay)
    pool = Pool(lay, has_index=PROBE_LAYERS, dims=PROBE_DIMS, format=FORMATS["fp32"], local_pages=6)
    pool.poison(range(6))
    reader = kind(world, pool, REF, Scratch(kind.scratch_bytes(pool, world.size, 64, 64)), index_topk=8, v_dim=12, scale=.25)
    for batch in batches:
        before = [b.pages.clone() for b in pool.buffers]
        plan = probe_plan(batch, pages, lay, world.rank, world.size, split=split)
        session = reader.open(plan)  # the rows of a trial are NaN where they are padding
        run_to_end(probe_steps(session, plan))
        session.end()
    changed = [(a != b.pages).view(24, -1).any(1).nonzero().flatten().tolist()
               for a, b in zip(before, pool.buffers) if len(b.pages)]
    slots = [[lay.slot_of(plan.owner, loc) for loc in locs] for locs in changed]
    return slots, all((b.pages[:1] == POISON).all() for b in pool.buffers), pages[0]

@pytest.mark.parametrize("R", [1, 2, 3])
@every_rule
@every_reader
def test_three_rows_after_twelve_change_three_slots(reader, rule, R):
    "Report 29: nothing of the longer batch is left in what is written; report 64: nor is a sink"
    kind = READERS[reader]
    got = local(second_batch, R, kind, RULES[rule](4))
    want = [int(got[0][2][p // 4]) * 4 + p % 4 for p in (12, 13, 14)]
    shards = got[:kind.shards(R)]
    for i in range(len(got[0][0])): assert sorted(s for slots, *_ in shards for s in slots[i]) == want
    assert all(slots == got[r % len(shards)][0] for r, (slots, *_) in enumerate(got))
    assert all(untouched for _, untouched, _ in got)

def nan_padding():
    "A model whose padding rows are NaN from the embedding on: padding has token 0"
    weights = dict(random_weights(CONFIG, seed=1))
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][0] = torch.nan
    return Model(CONFIG, weights, REF)

def with_nan(peers, reader, split):
    engine = engine_of(peers.world(), P=4, chunk=1000, reader=reader, split=split, model=nan_padding())
    out = []
    for n in (5, 1, 33):  # ranks that hold no row at all, then the normal request
        r = engine.begin(n, TEXT[:n])
        out.append((n, engine.compute([(r, n)], captures=[True])[0]))
        engine.abort(r)
    return out, all((b.pages[:1] == POISON).all() for b in engine.pool.buffers), engine.leaked_pages()

@pytest.mark.parametrize("R", [1, 4])
@every_way
def test_padding_that_is_nan_reaches_no_row_and_no_sink(reader, split, R):
    "Report 64 and trap 7: norms, experts and gathers see NaN beside the rows"
    for out, untouched, leaked in local(with_nan, R, reader, split):
        assert all(is_cold(c.logits, TEXT[:n]) and c.hidden.isfinite().all() for n, c in out)
        assert untouched and leaked == 0


# -- trap 18: ids


@pytest.mark.parametrize("R", [2, 3, 8])
def test_pages_that_were_translated_already_are_refused(R):
    "Trap 18: in a fresh pool, local pages in place of logical ones show a sink, or one page twice"
    lay = PageLayout(cp_size=R, page_size=4)
    def plan(table):
        ext = [Extend(request=0, start=0, stop=4 * len(table))]
        return ForwardPlan(split=zigzag_split(ext, R), page_tables=(table,), layout=lay, rank=0, owner=0,
                           tokens=(np.arange(4 * len(table)),), samples=(True,))
    for before, n in ((0, 1), (0, R), (2 * R, R), (R, 3 * R), (3 * R, 2)):
        _, pages = PageAllocator(lay, 40).take([cyclic_classes(0, before, 0, R), cyclic_classes(0, n, 0, R)])
        plan(pages)
        with pytest.raises(PageIdError, match="sink|twice"): plan(lay.local_page_of(pages))


# -- 12, 13, 89: ranks


def calls(peers, n):
    world = peers.world()
    engine = engine_of(world, P=64, chunk=1000, tokens=1024)
    engine.prefill(engine.begin(0, TEXT[:n]))
    owners = set(np.flatnonzero(engine.layout.count_by_owner(np.arange(8, 8 + -(-n // 64)))).tolist())
    return [[(e.op, e.tag, e.layer) for e in world.ledger.entries if e.lane == lane] for lane in LANES], owners

def test_a_rank_with_nothing_to_do_runs_the_same_collectives():
    "Report 12: five tokens on eight ranks have one owner and five computing ranks, a hundred have more of both"
    few, many = local(calls, 8, 5), local(calls, 8, 100)
    assert few[0][1] == {0} and many[0][1] == {0, 1}
    assert all(lanes == few[0][0] for lanes, _ in [*few, *many]) and any(few[0][0])

def five_waiting(peers, what):
    s = Scheduler(engine_of(peers.world(), P=1, tokens=32, chunk=16))
    me, seen, real = peers.rank, [], s.engine.run
    if what == "free": s.engine.alloc.take([[0, 1] * (13 - 2 * me)])  # 6 pages are free on rank 0, 10 on rank 1
    for i in (range(5) if what != "order" or me == 0 else range(4, -1, -1)):
        s.submit(i, TEXT[10 * i:10 * i + 3 + i], Want(max_new_tokens=2))
    if what == "id" and me: s.abort(3)
    def spy(ready, *more):
        seen.append([(r.request, stop) for r, stop in ready.batch])
        return real(ready, *more)
    s.engine.run = spy
    s.run()
    return seen, s.engine.leaked_pages()

@pytest.mark.parametrize("what", ["free", "id", "order"])
def test_ranks_with_other_numbers_are_named_and_nobody_hangs(what):
    "Report 13: free slots, an id that one rank does not know, another order in the queue"
    with pytest.raises(OrderError, match="different plans|has ended"): local(five_waiting, 2, what)

def test_ranks_with_equal_numbers_admit_the_same_in_the_same_order():
    (a, leaked), (b, other) = local(five_waiting, 2, "")
    assert a == b and leaked == other == 0 and {q for batch in a for q, _ in batch} == set(range(5))

def in_a_group(peers, n):
    world = peers.world(n)
    if world is None: return None
    engine = engine_of(world)
    return world.rank, world.size, engine.layout.cp_size, engine.prefill(engine.begin(0, TEXT[:33]))

@pytest.mark.parametrize("n", [1, 2, 4])
def test_rank_and_size_are_those_of_the_group_that_shares_the_cache(n):
    "Report 89: one, two or four of four peers; the others take no part"
    got = local(in_a_group, 4, n)
    assert got[n:] == [None] * (4 - n)
    for r, (rank, size, cp, logits) in enumerate(got[:n]): assert (rank, size, cp) == (r, n, n) and is_cold(logits, TEXT[:33])


# -- 14, 46: pages that travel


def pass_on(peers):
    "Four ranks prefill 10, 65 and 300 tokens in chunks of 256, the fifth goes on with what it receives"
    sizes, out = dict(P=64, chunk=256, tokens=512), []
    world = peers.world(4)
    engine = engine_of(Solo() if world is None else world, **sizes)
    for n in (10, 65, 300):
        if world is None:
            got = recv_pages(peers, engine.pool, engine.alloc, range(4))
            r = engine.adopt(n, np.append(TEXT[:n], got.first_token), got.pages, n)
            out.append((page_digests(engine.pool, 0, got.pages, n), engine.step(r), r.tokens))
        else:
            r = engine.begin(n, TEXT[:n])
            first, pages = greedy(engine.prefill(r)), r.pages
            send = send_plan(engine.layout, PageLayout(cp_size=1, page_size=64), pages)[peers.rank]
            send_pages(peers, engine.pool, send, 4, request=n, num_tokens=n, first_token=first, total_pages=len(pages))
            out.append((send.position.tolist(), page_digests(engine.pool, peers.rank, pages, n)))
        engine.abort(r)
    return out, engine.leaked_pages()

def test_ranks_that_own_no_page_finish_the_transfer_too():
    "Report 14: one, two and five pages on four ranks arrive at their positions, and decode goes on"
    *sent, (received, leaked) = local(pass_on, 5)
    assert leaked == 0 and all(lost == 0 for _, lost in sent)
    at = [[out[i][0] for out, _ in sent] for i in range(3)]
    assert [sorted(map(len, x)) for x in at] == [[0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 2]]
    assert [sorted(sum(x, [])) for x in at] == [[0], [0, 1], [0, 1, 2, 3, 4]]
    assert [0, 4] in at[2]  # the first and the last page have one owner
    for i, (digests, logits, tokens) in enumerate(received):
        assert digests == {p: h for out, _ in sent for p, h in out[i][1].items()}
        assert is_cold(logits, tokens)

def test_a_page_of_values_then_scales_reads_the_same_everywhere():
    "Report 46: 48 bytes, scales 1, 2, 4, 8, by row, by page and on the other side; each layer has its own scales"
    lay, locs = PageLayout(cp_size=1, page_size=4), torch.arange(4, 8)
    here, there = (Pool(lay, has_index=(True, True), dims=PayloadDims(latent=8, rope=4, index=8),
                        format=FORMATS["fp8_packed"], local_pages=n) for n in (2, 3))
    there.poison(range(3))
    value = torch.randint(0, 120, (4, 8), dtype=torch.uint8)
    for layer, b in enumerate(here.index):
        scale = torch.tensor([1., 2, 4, 8]) * 16**layer
        REF.store_rows(b.pages, torch.cat([value, scale.view(torch.uint8).view(4, 4)], 1), locs, b.fmt, 4)
        assert b.page_bytes == 48 and b.pages[1, 32:].clone().view(torch.float32).tolist() == scale.tolist()
        assert b.pages[1, 8:16].tolist() == value[1].tolist()
    place_pages(there, [2], pack_pages(here, [1]))
    for layer, (a, b) in enumerate(zip(here.index, there.index)):
        want = value.view(torch.float8_e4m3fn).float() * (torch.tensor([1., 2, 4, 8]) * 16**layer)[:, None]
        by_row = REF.gather_rows(a.pages, locs, a.fmt, 4)
        by_page = REF.page_rows(REF.gather_pages(a.pages, torch.tensor([1])), a.fmt, 4)
        moved = REF.gather_rows(b.pages, locs + 4, b.fmt, 4)
        for rows in (by_row, by_page, moved): assert torch.equal(a.fmt.decode(rows), want)


# -- 17, 18, 20, 25, 51, 61, 62: one request's pages


def full_pool(peers, other):
    "Sixteen tokens published, then an abort, then another request that fills what is left of ten pages"
    engine = engine_of(peers.world(), chunk=8, tokens=40)
    total = engine.alloc.num_pages - engine.layout.num_sinks
    r = engine.begin(0, TEXT[:24])
    engine.step(r), engine.step(r)
    engine.publish(r)
    engine.abort(r), engine.check()
    assert (engine.tree.num_pages, sum(engine.alloc.count(Holder.FREE))) == (4, total - 4)
    r = engine.begin(1, TEXT[100:100 + other])
    logits = engine.prefill(r)
    engine.finish(r), engine.check()
    again = engine.begin(2, TEXT[:24])
    cached, out = again.cached, engine.prefill(again)
    engine.finish(again)
    return logits, out, cached, engine.leaked_pages()

@pytest.mark.parametrize("R", [1, 2, 5])
@pytest.mark.parametrize("other,hits", [(24, 16), (40, 0)], ids=["fits-beside", "needs-them"])
def test_what_was_published_before_an_abort_is_right_or_gone(R, other, hits):
    "Report 17"
    for logits, out, cached, leaked in local(full_pool, R, other):
        assert is_cold(logits, TEXT[100:100 + other]) and is_cold(out, TEXT[:24])
        assert cached == hits and leaked == 0

def unpublished(peers):
    engine, seen = engine_of(peers.world(), chunk=8), []
    r = engine.begin(0, TEXT[:20])
    while (logits := engine.step(r)) is None: seen.append((r.computed, len(r.pages)))
    seen.append((r.computed, len(r.pages)))
    held = sum(engine.alloc.count(Holder.REQUEST))
    owner = engine.layout.owner_of_page(r.pages).tolist()
    engine.abort(r)
    free = sum(engine.alloc.count(Holder.FREE)) == engine.alloc.num_pages - engine.layout.num_sinks
    return logits, seen, held, free, engine.tree.num_pages, owner

@pytest.mark.parametrize("R", [1, 2, 3])
def test_chunks_go_on_without_a_tree(R):
    "Report 18: a request that is never published computes 8, 8 and 4 tokens; trap 32: its chain has a base"
    for logits, seen, held, free, in_tree, owner in local(unpublished, R):
        assert seen == [(8, 2), (16, 4), (20, 5)] and held == 5 and free and in_tree == 0
        assert is_cold(logits, TEXT[:20]) and owner == [i % R for i in range(5)]

def spoken(peers):
    "One request, then fifty of other lengths, then an abort in the middle of decoding"
    engine = engine_of(peers.world(), P=64, chunk=1000, tokens=512, model=FLAT)
    total = engine.alloc.num_pages - engine.layout.num_sinks
    for i in range(51):
        r = engine.begin(i, TEXT[:100])
        for _ in range(1 if i else 30):
            r.tokens = np.append(r.tokens, np.int32(1 + i))
            engine.prefill(r)
        r.tokens = r.tokens[:r.computed]
        engine.finish(r) if i % 2 else engine.abort(r)
        engine.check()
    held = sum(engine.alloc.count(Holder.REQUEST))
    engine.alloc.free(engine.tree.evict(engine.tree.num_pages), Holder.TREE)
    return held, total - sum(engine.alloc.count(Holder.FREE))

def test_no_tail_page_is_stranded_by_decoding():
    "Report 20, without a draft: pages are counted from tokens, and all come back"
    assert local(spoken, 2) == [(0, 0)] * 2

def thrice(peers):
    s, out = Scheduler(engine_of(peers.world(), chunk=100)), []
    for i, n in enumerate((8, 8, 8, 9, 9)):
        run = s.submit(i, TEXT[:n], Want(max_new_tokens=1))
        s.run()
        out.append((run.cached, run.output, run.logprobs))
    return out, s.engine.leaked_pages()

@pytest.mark.parametrize("R", [1, 3])
def test_a_prompt_that_is_known_whole_still_computes_a_token(R):
    "Report 25, through the scheduler: 4 of 8 tokens are reused, 8 of 9, and the answer stays"
    for out, leaked in local(thrice, R):
        assert [c for c, *_ in out] == [0, 4, 4, 8, 8] and leaked == 0
        assert out[0][1:] == out[1][1:] == out[2][1:] and out[3][1:] == out[4][1:]

def share(peers, shared):
    engine = engine_of(peers.world(), P=16, chunk=1000, tokens=512)
    r = engine.begin(0, TEXT[:96])
    engine.prefill(r), engine.finish(r)
    tokens = np.concatenate([TEXT[:shared], TEXT[200:230]])
    r = engine.begin(1, tokens)
    return r.cached, engine.prefill(r), tokens

@pytest.mark.parametrize("shared,hit", [(15, 0), (16, 16), (48, 48), (63, 48), (64, 64), (65, 64)])
def test_a_hit_counts_pages_and_not_pages_times_ranks(shared, hit):
    "Report 51: four ranks, pages of 16"
    for cached, logits, tokens in local(share, 4, shared): assert cached == hit and is_cold(logits, tokens)

def aborted_when(peers, state):
    s = Scheduler(engine_of(peers.world(), chunk=8, max_batch=1))
    s.submit(0, TEXT[:20], Want(max_new_tokens=4))
    s.submit(1, TEXT[50:62], Want(max_new_tokens=1))
    for _ in range(dict(queued=0, begun=1, decoding=4, done=9)[state]): s.step()
    for _ in range(2): s.abort(0)
    s.engine.check()
    mine = sum(s.engine.alloc.count(Holder.REQUEST))
    out = s.run()
    return mine, 1 in out or state == "done", s.engine.leaked_pages()

@pytest.mark.parametrize("state", ["queued", "begun", "decoding", "done"])
def test_an_abort_in_any_state_gives_all_back_once(state):
    "Report 61, those of its states that are built"
    assert local(aborted_when, 2, state) == [(0, True, 0)] * 2

def test_the_split_of_cached_tokens_is_told_once_a_request():
    "Report 62, device part: a hundred prompts of three chunks after a hit of two pages"
    s = Scheduler(engine_of(Solo(), chunk=8, tokens=512, model=FLAT))
    s.submit(999, TEXT[:9], Want(max_new_tokens=1))
    s.run()
    rng, steps, computed = np.random.default_rng(0), [0], []
    real = s.engine.run
    def spy(ready, *more):
        steps[0] += 1
        computed.append(sum(stop - r.computed for r, stop in ready.batch))
        return real(ready, *more)
    s.engine.run = spy
    runs = [s.submit(i, np.concatenate([TEXT[:8], [i + 1], rng.integers(0, 256, 23)]), Want(max_new_tokens=1))
            for i in range(100)]
    s.run()
    assert [run.cached for run in runs] == [8] * 100
    assert steps[0] == 300 and sum(computed) + sum(run.cached for run in runs) == 100 * 32


# -- 45: rows that see little, in every format


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_of_none_one_and_five_keys_in_every_format(name):
    "Report 45: NaN in the first, the last and every unused row of the pool"
    fmt, P = FORMATS[name].latent(32, 8), 4
    pages = torch.full((4, fmt.page_bytes(P)), POISON, dtype=torch.uint8)
    rows = fmt.encode(torch.randn(5, 40))
    REF.store_rows(pages, rows, torch.arange(5, 10), fmt, P)
    loc = torch.full((32, 8), -1)
    loc[1, 0], loc[2, :5] = 7, torch.arange(5, 10)
    state = REF.sparse_mla(torch.randn(32, 3, 40), pages, loc, fmt, P, v_dim=32, scale=.1)
    assert state.out.isfinite().all() and state.lse[1:3].isfinite().all()
    for none in (0, *range(3, 32)): assert not state.out[none].any() and (state.lse[none] == -torch.inf).all()
    assert torch.equal(state.out[1], fmt.decode(rows[2:3])[0, :32].expand(3, 32))
    every, one = fmt.decode(rows)[:, :32], state.out[2]
    assert (one <= every.amax(0)).all() and (one >= every.amin(0)).all() and one.any()


# -- 67, 74: the end of the pool and of the context


def three_grow(peers):
    "Nine pages, three requests of three pages, each needs one more"
    s = Scheduler(engine_of(peers.world(), tokens=36, chunk=64))
    runs = [s.submit(i, TEXT[20 * i:20 * i + 12], Want(max_new_tokens=4)) for i in range(3)]
    s.run()
    return [(run.output, run.retracted, run.error) for run in runs], s.engine.leaked_pages()

def test_requests_that_outgrow_the_pool_give_way_and_all_finish():
    "Report 67, without a handoff"
    alone = engine_of(Solo())
    want = [generate(alone, i, TEXT[20 * i:20 * i + 12], 4)[0] for i in range(3)]
    for R in (1, 3):
        for runs, leaked in local(three_grow, R):
            assert [out for out, *_ in runs] == want and leaked == 0
            assert sum(n for _, n, _ in runs) > 0 and all(e is None for *_, e in runs)

def to_the_limit(peers, with_a):
    "Context of 64, pages of one token; the first request speaks until its 64th"
    s = Scheduler(engine_of(peers.world(), P=1, tokens=128, chunk=128, max_tokens=64))
    with pytest.raises(CapacityError, match="longer"): s.submit(0, TEXT[:40], Want(max_new_tokens=26))
    runs = [s.submit(0, TEXT[:40], Want(max_new_tokens=25))] * with_a
    runs.append(s.submit(1, TEXT[80:110], Want(max_new_tokens=30)))
    s.run()
    return [run.output for run in runs], s.engine.leaked_pages()

def test_a_request_that_reaches_the_context_limit_leaves_its_neighbour_alone():
    "Report 74, without a draft"
    alone, leaked = local(to_the_limit, 1, False)[0]
    for (a, b), lost in local(to_the_limit, 2, True): assert b == alone[0] and len(a) == 25 and lost == leaked == 0


# -- 85, 86, 87, 88: options and sizes


def chunk_lengths(peers):
    s = Scheduler(engine_of(peers.world(), P=64, chunk=2048, tokens=16384))
    seen, real = [], s.engine.run
    def spy(ready, *more):
        seen.append([(r.request, stop - r.computed) for r, stop in ready.batch])
        return real(ready, *more)
    def forward(plan, choose, *_):  # the model is not what this is about
        ids = iter(choose([torch.arange(256.) for last in plan.samples if last]))
        return [Computed(torch.arange(256.), next(ids), None) if last else Computed(None, None, None) for last in plan.samples]
    s.engine.run, s.engine._forward = spy, forward
    for i in range(2): s.submit(i, np.full(5000, 7 + i), Want(max_new_tokens=1))
    s.run()
    return seen

@pytest.mark.parametrize("R", [1, 4])
def test_a_chunk_is_tokens_of_a_step_over_all_ranks_and_requests(R):
    "Report 85: two prompts of 5,000 in chunks of 2,048; the help says the same"
    want = [[(0, 2048)], [(0, 2048)], [(0, 904), (1, 1088)], [(1, 2048)], [(1, 1864)]]
    assert local(chunk_lengths, R) == [want] * R
    demo = next(a for a in make_parser()._actions if a.dest == "command").choices["demo"]
    assert re.search(r"tokens computed in one step, over all\s+ranks \(default:\s+2048\)", demo.format_help())

@pytest.mark.parametrize("option", [o for o in OPTIONS if o.kind is int], ids=lambda o: o.name)
def test_an_option_is_taken_as_given_or_refused_aloud(option):
    "Report 86: no hidden floor, no rounding"
    for value in (-8192, -1, 0, 1, 2, 63, 64, 8191, 8192, option.most, option.most + 1):
        try: _, _, config = parse([option.command or "demo", option.said, str(value)])
        except InputError as e:
            assert option.said in str(e)
            assert option.later or (str(value) in str(e) and not option.least <= value <= option.most)
        else: assert config[option.key] == value and option.least <= value <= option.most and not option.later

def capacity(peers, P, tokens):
    engine = engine_of(peers.world(), P=P, tokens=tokens)
    engine.admit(0, np.ones(tokens))
    with pytest.raises(CapacityError, match=f"most={tokens}"): engine.admit(0, np.ones(tokens + 1))
    return engine.most_tokens, engine.alloc.available_tokens, engine.pool.local_pages

@pytest.mark.parametrize("R", [1, 3])
def test_the_capacity_that_is_said_is_there(R):
    "Report 86: a prompt of exactly so many tokens fits, one more does not; the pool rounds up by less than a page a rank"
    for P in (1, 4, 64):
        for n in sorted({1, P, P + 1, R * P, R * P + 1, 2 * R * P}):
            for most, there, pages in local(capacity, R, P, n):
                assert most == n <= there < n + R * P and (pages - 1) * R * P == there

def half_split(peers):
    "Eight ranks share the cache, another feature has cut the batch for four"
    world, lay = peers.world(), PageLayout(cp_size=8, page_size=64)
    kind, ext = READERS["full_view"], [Extend(request=0, start=0, stop=1026)]
    pool = Pool(lay, has_index=(True,), dims=PROBE_DIMS, format=FORMATS["fp32"], local_pages=4)
    reader = kind(world, pool, REF, Scratch(1 << 20), index_topk=8, v_dim=12, scale=.25)
    plan = ForwardPlan(split=zigzag_split(ext, 4), page_tables=(np.arange(8, 25),), layout=lay, rank=world.rank % 4,
                       owner=world.rank, tokens=(np.arange(1026),), samples=(False,))
    with pytest.raises(ConfigError, match="ranks=4 in the plan, 8 here"): reader.open(plan)
    return world.ledger.entries, reader.scratch.free_bytes

@every_rule
def test_two_features_cut_by_one_number_or_are_refused(rule):
    "Report 87: 1,026 and 1,027 tokens on eight ranks"
    for n in (1026, 1027): covers(RULES[rule](64), 8, 64, [(0, n)])
    assert local(half_split, 8) == [([], 1 << 20)] * 8

def test_nothing_but_cp_sets_the_number_of_ranks():
    "Report 87: no other option switches it on or off, and the effective options are all told"
    for o in OPTIONS:
        if o.command != "demo" or o.later or o.key == "cp": continue
        value = "1" if o.kind is int else o.choices[0] if o.choices else "x"
        _, _, config = parse(["demo", o.said, value])
        assert config["cp"] == 2 and set(config) == {x.key for x in OPTIONS if x.command == "demo"}

def odd_pages(peers, P, fmt):
    engine = engine_of(peers.world(), P=P, format=fmt, chunk=30)
    r = engine.begin(0, TEXT[:50])
    return engine.prefill(r), engine.abort(r), engine.leaked_pages()

@pytest.mark.parametrize("P", [1, 3, 48])
@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_any_page_size_in_any_format(P, fmt):
    "Report 88: pages of one token, and of numbers that no packing divides"
    for logits, _, leaked in local(odd_pages, 2, P, fmt): assert is_cold(logits, TEXT[:50], fmt) and leaked == 0


# -- the map


def names_of(path: Path) -> set[str]:
    "Tests of a file: its functions, and its state machines"
    text = path.read_text(encoding="utf-8")
    return set(re.findall(r"^def (test_\w+)", text, re.M)) | set(re.findall(r"^(Test\w+) =", text, re.M))

KNOWN = {f"tests/{p.name}::{name}" for p in (ROOT/"tests").glob("test_*.py") for name in names_of(p)}
PAGE = (ROOT/"docs"/"field-cases.md").read_text(encoding="utf-8")
CHAPTERS = {"10_prefetch", "14e_store", "15_handoff", "16a_verify", "18_serve", "19_replay"}
GROWS = {"15_handoff"}  # is there, and waits for its Mooncake part

def table_of(heading: str) -> list[list[str]]:
    "Cells of the table below a heading"
    part = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [x for x in part.split("\n") if x.startswith("|")]
    return [[c.strip() for c in x.strip("|").split("|")] for x in lines[2:]]

def holders(cell: str) -> tuple[list[str], list[str]]:
    "Tests and chapters of a cell that has nothing else"
    tests, chapters = re.findall(r"`([^`]+)`", cell), re.findall(r"arrives with (\w+)", cell)
    parts = [f"`{t}`" for t in tests] + [f"arrives with {c}" for c in chapters]
    assert sorted(parts) == sorted(cell.split(", ")), cell
    return tests, chapters

REPORTS, TRAPS = table_of("Public reports"), table_of("Traps")

def test_every_report_and_every_trap_has_a_row():
    missing = {19, 21, 31, 40}  # numbers that no report has
    assert [int(row[0]) for row in REPORTS] == [n for n in range(9, 95) if n not in missing]
    assert [int(row[0]) for row in TRAPS] == list(range(1, 70))
    assert all(len(row) == 5 for row in REPORTS) and all(len(row) == 4 for row in TRAPS)
    assert all(set(row[2].split(", ")) <= set("abcdefghij") for row in REPORTS)
    assert all(re.fullmatch(r"([\w.-]+/)?[\w.-]+#\d+", row[1]) for row in REPORTS)
    for column in (1, 3): assert len({row[column] for row in REPORTS}) == len(REPORTS) == 82

@pytest.mark.parametrize("row", REPORTS, ids=lambda row: row[0])
def test_a_report_is_held_by_tests_that_exist_or_by_a_chapter_to_come(row):
    tests, chapters = holders(row[4])
    assert set(tests) <= KNOWN, set(tests) - KNOWN
    assert set(chapters) <= CHAPTERS and (tests or chapters)
    built = {c for c in chapters if (ROOT/f"nbs/{c}.ipynb").exists()} - GROWS
    if set(row[2].split(", ")) & set("abfhj"): assert tests or not built, f"{built} is there: name its tests"

@pytest.mark.parametrize("row", TRAPS, ids=lambda row: row[0])
def test_a_trap_is_held_by_tests_that_exist_or_by_a_chapter_to_come(row):
    if row[3].startswith("no chapter: "): return
    tests, chapters = holders(row[3])
    assert set(tests) <= KNOWN, set(tests) - KNOWN
    assert set(chapters) <= CHAPTERS and (tests or chapters)
    if int(row[0]) in {*range(1, 21), *range(26, 34)}: assert tests

def test_lengths_are_held_by_tests_that_exist():
    for row in table_of("Lengths"): assert holders(row[1])[0] and set(holders(row[1])[0]) <= KNOWN

def test_no_test_of_this_file_is_left_out_of_the_map():
    here = Path(__file__)
    map_ = re.split("^# -- the map", here.read_text(encoding="utf-8"), flags=re.M)[1]
    mine = names_of(here) - set(re.findall(r"^def (test_\w+)", map_, re.M))
    assert {n for n in mine if f"tests/{here.name}::{n}`" not in PAGE} == set() and len(mine) > 30
