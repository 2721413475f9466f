"One copy attends as many do, bit for bit, whatever the ranks, pages, chunks and batches"
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cpkv.all_gather import ForwardPlan
from cpkv.bench import IDLE, IdleWorld, idle
from cpkv.launch import run_ranks
from cpkv.laws import OrderError
from cpkv.layout import PageLayout
from cpkv.ops.table import REF
from cpkv.pool import POISON, Pool, format_of
from cpkv.reader import Reader, run_to_end
from cpkv.scratch import Scratch
from cpkv.shared_kv import (PROBE_DIMS, PROBE_LAYERS, READERS, ChunkReuse, FullView, PageSource,
                            page_sources, place_locs, probe_pages, probe_plan,
                            probe_reader, probe_steps, reuse_pages, view_bytes, view_pages)
from cpkv.split import Extend, SPLITS, interleave_split, zigzag_split
from trials import alone, chunks, over, same

KINDS = list(READERS.values())

# -- the view


@st.composite
def batch_of_tables(draw):
    "Requests on shuffled pages, some of which share their history"
    cp, P = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    lay, rng = PageLayout(cp_size=cp, page_size=P), np.random.default_rng(draw(st.integers(0, 99)))
    free = iter((rng.permutation(200) + cp).tolist())
    shared = [next(free) for _ in range(draw(st.integers(0, 4)))]
    ext, tables = [], []
    for i in range(draw(st.integers(1, 4))):
        common = draw(st.integers(0, len(shared)))
        start = common * P + draw(st.integers(0, 9))
        stop = start + draw(st.integers(1, 12))
        own = [next(free) for _ in range(lay.num_pages(stop) - common + draw(st.integers(0, 2)))]
        ext.append(Extend(request=i, start=start, stop=stop))
        tables.append(np.array(shared[:common] + own, np.int32))
    return lay, tuple(ext), tuple(tables)

@given(batch_of_tables())
def test_a_view_holds_each_page_once_and_the_table_finds_it(batch):
    lay, ext, tables = batch
    plans = [ForwardPlan(split=zigzag_split(ext, lay.cp_size), page_tables=tables, layout=lay, rank=r,
                         owner=r, tokens=tuple(np.zeros(e.stop) for e in ext),
                         samples=(False,) * len(ext)) for r in range(lay.cp_size)]
    views = [view_pages(p) for p in plans]
    most = views[0].max_pages
    assert all(len(v.send) == most and v.table.tolist() == views[0].table.tolist() for v in views)
    landed = [lay.page_of(r, int(p)) for r, v in enumerate(views) for p in v.send]
    used = [t[:lay.num_pages(e.stop)].tolist() for t, e in zip(tables, ext)]
    assert [landed[j] for j in views[0].table] == [p for t in used for p in t]
    real = [p for p in landed if not lay.is_sink_page(p)]
    assert sorted(real) == sorted({p for t in used for p in t})
    for v in views:                                                  # filler only at the end
        sinks = np.flatnonzero(v.send == 0)
        assert sinks.tolist() == list(range(most - len(sinks), most))
    assert most == max(np.bincount(np.array(real) % lay.cp_size, minlength=lay.cp_size))
    assert view_bytes(most, 10, lay.cp_size) == (lay.cp_size - 1) * most * 10

@given(batch_of_tables())
def test_the_three_cases_of_a_page(batch):
    "History only, current only, mixed, told token by token; the view gathers history and nothing else"
    lay, ext, tables = batch
    plan = ForwardPlan(split=zigzag_split(ext, lay.cp_size), page_tables=tables, layout=lay, rank=0,
                       owner=0, tokens=tuple(np.zeros(e.stop) for e in ext), samples=(False,) * len(ext))
    want = {frozenset([True]): PageSource.HISTORY, frozenset([False]): PageSource.CURRENT,
            frozenset([True, False]): PageSource.MIXED}
    P, view, sources, got = lay.page_size, reuse_pages(plan), page_sources(plan).tolist(), []
    for e in ext:
        for j in range(lay.num_pages(e.stop)):
            kinds = {p < e.start for p in range(j * P, min((j + 1) * P, e.stop))}
            got.append(want[frozenset(kinds)])
    assert sources == got and view.num_current == got.count(PageSource.CURRENT)
    gathered = {int(p) for p, s in zip(plan.tables[0], got) if s is not PageSource.CURRENT}
    most = max(np.bincount([p % lay.cp_size for p in gathered], minlength=lay.cp_size))
    assert view.max_pages == most
    first = lay.cp_size * most                                       # current pages lie behind
    assert sorted(view.table[[s is PageSource.CURRENT for s in got]]) == [*range(first, first + view.num_current)]
    loc, where = place_locs(plan, view), iter(range(10**6))
    for e, base in zip(ext, plan.tables[1]):
        for t in range(e.start, e.stop):
            assert loc[next(where)] == view.table[base + t // P] * P + t % P

def counted(peers, kind, batches, stores=frozenset(), split=zigzag_split):
    "Tags of the gathers of each layer, in order, of every batch"
    world = peers.world()
    class Once:
        def world(self): return world
    probe_reader(Once(), kind, batches, "fp32", 4, stores, None, split)
    return [(e.layer, e.tag) for e in world.ledger.entries]

def test_a_cold_batch_gathers_the_chunk_alone():
    chunk, view = ["chunk.latent", "chunk.index"], ["view.index", "view.latent"]
    def tags(reads): return [(n, t) for n, has in enumerate(PROBE_LAYERS)
                             for t in [*chunk, *(view * reads)] if has or "latent" in t]
    for R in (1, 2, 3):
        for cut in ((0, 9), (0, 8), (0, 1)):
            assert run_ranks(counted, R, ChunkReuse, chunks(*cut), backend="local") == [tags(0)] * R
        warm = run_ranks(counted, R, ChunkReuse, chunks(0, 5, 9), backend="local")
        assert warm == [tags(0) + tags(1)] * R

def test_history_travels_once_and_the_chunk_never_twice():
    "Bytes of one layer, by hand: pages of 4 rows of 64 + 32 bytes; 2 ranks"
    def bytes_of(kind, cuts):
        return run_ranks(probe_reader, 2, kind, chunks(*cuts), backend="local")[0][1][-1][0]
    row, page = 96, 4 * 96
    assert bytes_of(FullView, (0, 16, 24)) == 4 * row + 3 * page      # 6 pages, 3 an owner
    assert bytes_of(ChunkReuse, (0, 16, 24)) == 4 * row + 2 * page    # 4 of history
    assert bytes_of(ChunkReuse, (0, 17, 24)) == 4 * row + 3 * page    # the fifth is mixed, an owner has 3
    assert bytes_of(ChunkReuse, (0, 24)) == 12 * row

def test_a_mixed_page_shows_the_new_rows_whatever_the_owner_had_there():
    "The begun page's owner holds another request's bytes where the chunk's rows go"
    def rank(peers, kind):
        reader, plans = bench(peers, kind, [[(7, 0, 8)], [(0, 0, 5)], [(0, 5, 8)]])
        table = plans[0].page_tables[0]
        plans = [plans[0], *(dataclasses.replace(p, page_tables=(table[:len(p.page_tables[0])],)) for p in plans[1:])]
        return [finish_one(reader, p) for p in plans][-1]
    want = {k: v for k, v in alone(chunks(0, 8)).items() if k[2] >= 5}
    for kind in (FullView, ChunkReuse):
        assert same(join(run_ranks(rank, 3, kind, backend="local")), want)


# -- same bits


@pytest.mark.parametrize("P,fmt", [(1, "fp32"), (4, "fp32"), (4, "bf16"), (16, "bf16")])
def test_same_bits_over_ranks_readers_and_chunks(P, fmt):
    cuts = [(0, 13, 14, 37), (0, 5, 36, 37), (0, 16, 32, 37), (0, 37)]
    oracle = over(1, Reader, chunks(0, 37), fmt, P)
    ways = zip(itertools.product((1, 2, 3, 4, 8), KINDS), itertools.cycle(cuts),
               itertools.cycle([zigzag_split, interleave_split, interleave_split, zigzag_split, zigzag_split]))
    for (R, kind), cut, split in ways:
        got = over(R, kind, chunks(*cut), fmt, P, frozenset(), None, split)
        assert same(got, oracle), (R, kind.name, cut, split)

def test_formats_differ():
    "So that equality above says something"
    one, two = (over(1, Reader, chunks(0, 37), fmt) for fmt in ("fp32", "bf16"))
    assert one.keys() == two.keys() and not same(one, two)

@pytest.mark.parametrize("R", [2, 3])
@pytest.mark.parametrize("history", [0, 4])
def test_boundary_lengths(R, history):
    P = 4
    for n in sorted({1, P - 1, P, P + 1, 2 * P, R * P - 1, R * P, R * P + 1, 2 * R * P}):
        cuts = (0, history, history + n) if history else (0, n)
        assert same(over(R, FullView, chunks(*cuts)), over(1, Reader, chunks(0, history + n))), n

@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_sixteen_tokens_in_any_chunks(chunk):
    cuts = [*range(0, 16, chunk), 16]
    assert same(over(2, FullView, chunks(*cuts)), over(1, Reader, chunks(0, 16)))

@st.composite
def conversations(draw):
    "Requests cut in chunks, dealt over batches in any order"
    left = {q: [0, *sorted(draw(st.sets(st.integers(1, 30), min_size=1, max_size=4)))]
            for q in range(draw(st.integers(1, 4)))}
    batches = []
    while any(len(cuts) > 1 for cuts in left.values()):
        able = [q for q, cuts in left.items() if len(cuts) > 1]
        go = draw(st.permutations(able))[:draw(st.integers(1, len(able)))]
        batches.append([(q, left[q][0], left[q][1]) for q in go])
        for q in go: del left[q][0]
    return batches

@settings(max_examples=12)
@given(conversations(), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 4, 16]),
       st.sampled_from([*SPLITS.values()]), st.integers(0, 9))
def test_any_batches_equal_each_request_alone(batches, R, P, split, seed):
    kind = KINDS[seed % 3]
    lay = PageLayout(cp_size=kind.shards(R), page_size=P)
    pages = probe_pages(batches, lay)                                # shuffled: owners are unbalanced
    ids = np.random.default_rng(seed).permutation(np.concatenate(list(pages.values())))
    pages = dict(zip(pages, np.split(ids, np.cumsum([len(t) for t in pages.values()])[:-1])))
    got = over(R, kind, batches, "fp32", P, frozenset(), pages, split)
    assert same(got, alone(batches, "fp32", P))

def test_two_uneven_requests():
    "Lengths 5 and 9 on two ranks, and 20 and 36 on pages of four"
    for a, b in ((5, 9), (20, 36)):
        batches = [[(0, 0, a), (1, 0, b)]]
        assert same(over(2, FullView, batches), alone(batches))

def test_few_tokens_on_eight_ranks():
    for batches in ([[(0, 0, 5)]], [[(0, 0, 5), (1, 0, 100)]], [[(0, 0, 63)], [(0, 63, 64)]]):
        assert same(over(8, FullView, batches, "fp32", 64), alone(batches, "fp32", 64))

def test_ranks_that_run_in_another_order_say_the_same():
    batches = [[(0, 0, 13), (1, 0, 5)], [(2, 0, 1), (0, 13, 37), (1, 5, 6)]]
    want = alone(batches)
    for seed in (1, 2, 3): assert same(over(3, FullView, batches, seed=seed), want)

def test_real_processes_say_the_same():
    batches = [[(0, 0, 13), (1, 0, 5)], [(2, 0, 1), (0, 13, 37), (1, 5, 6)]]
    got = over(2, FullView, batches, backend="gloo", debug=True)
    assert same(got, alone(batches))


# -- by hand: several sessions, aborts, what is shared


def bench(peers, kind, batches, P=4, fmt="fp32"):
    "A poisoned pool and a reader with room for two batches"
    world = peers.world()
    lay = PageLayout(cp_size=kind.shards(world.size), page_size=P)
    pages = probe_pages(batches, lay)
    local = lay.local_page_of(int(max(t.max() for t in pages.values()))) + 1
    pool = Pool(lay, has_index=PROBE_LAYERS, dims=PROBE_DIMS, format=format_of(fmt), local_pages=local)
    pool.poison(range(local))
    arena = 3 * kind.scratch_bytes(pool, world.size, 128, 128)
    reader = kind(world, pool, REF, Scratch(arena), index_topk=8, v_dim=12, scale=0.25)
    plans = [probe_plan(b, pages, lay, world.rank, world.size) for b in batches]
    return reader, plans

def finish_one(reader, plan):
    reader.scratch.arena.fill_(POISON)
    session = reader.open(plan)
    said = run_to_end(probe_steps(session, plan))
    session.end()
    return said

def join(outs): return {k: v for said in outs for k, v in said.items()}

def num_yields(kind, history=False):
    reads = kind is FullView or (kind is ChunkReuse and history)
    return sum(1 + reads * (1 + has) for has in PROBE_LAYERS)

@pytest.mark.parametrize("R,kind", [(1, Reader), (2, Reader), (1, FullView), (2, FullView), (2, ChunkReuse)])
def test_aborted_at_any_yield_and_run_again(R, kind):
    batches = [[(0, 0, 9), (1, 0, 2)]]
    def rank(peers):
        reader, (plan,) = bench(peers, kind, batches)
        arena, outs, k = len(reader.scratch.arena), [], 0
        while True:
            reader.scratch.arena.fill_(POISON)
            session = reader.open(plan)
            steps = probe_steps(session, plan)
            try:
                for _ in range(k): next(steps)
                next(steps)
            except StopIteration: break
            session.abort()
            assert reader.scratch.free_bytes == arena and not reader.world.pending
            outs.append(finish_one(reader, plan))
            k += 1
        session.end()
        assert reader.scratch.free_bytes == arena and all(same(o, outs[0]) for o in outs)
        return outs[0], k, reader.world.ledger.lines("main")
    got = run_ranks(rank, R, backend="local")
    assert [k for _, k, _ in got] == [num_yields(kind)] * R
    assert all(lines == got[0][2] for *_, lines in got)
    assert same(join(said for said, *_ in got), alone(batches))

@pytest.mark.parametrize("kind", KINDS)
def test_two_sessions_alternate(kind):
    batches = [[(0, 0, 23)], [(1, 0, 9), (2, 0, 3)]]
    def rank(peers):
        reader, plans = bench(peers, kind, batches)
        reader.scratch.arena.fill_(POISON)
        sessions = [reader.open(p) for p in plans]
        running, said = dict(enumerate(map(probe_steps, sessions, plans))), {}
        while running:
            for i, steps in list(running.items()):
                try: next(steps)
                except StopIteration as done:
                    said |= done.value
                    del running[i]
        for s in sessions: s.end()
        assert reader.scratch.free_bytes == len(reader.scratch.arena)
        return said
    for R in (1, 3): assert same(join(run_ranks(rank, R, backend="local")), alone(batches))

def test_a_session_ends_while_another_goes_on():
    batches = [[(0, 0, 23)], [(1, 0, 9)]]
    def rank(peers):
        reader, plans = bench(peers, FullView, batches)
        first, second = (reader.open(p) for p in plans)
        steps = probe_steps(second, plans[1])
        next(steps)
        first.abort()
        with_room = reader.open(plans[0])                            # takes the place of the first
        said = run_to_end(steps)
        second.end()
        with_room.abort()
        return said
    assert same(join(run_ranks(rank, 2, backend="local")), alone(batches[1:]))

def test_requests_that_share_their_history_read_one_copy():
    "Two requests on one prefix of two pages: the view has it once, and both see it"
    whole, cut = 8, 8
    def rank(peers):
        reader, (first,) = bench(peers, FullView, [[(0, 0, 20)]])
        lay, ext = reader.pool.layout, [Extend(request=0, start=0, stop=cut)]
        prefix = first.page_tables[0][:2]
        def plan(extends, tables):
            return ForwardPlan(split=zigzag_split(extends, 2), page_tables=tables, layout=lay,
                               rank=first.rank, owner=first.owner, samples=(False,) * len(extends),
                               tokens=tuple(np.arange(e.stop) for e in extends))
        finish_one(reader, plan(ext, (prefix,)))
        own = first.page_tables[0][2:]
        two = [Extend(request=0, start=whole, stop=12), Extend(request=0, start=whole, stop=11)]
        both = plan(two, (np.append(prefix, own[0]), np.append(prefix, own[1])))
        assert view_pages(both).max_pages == 2 and len(set(view_pages(both).table.tolist())) == 4
        return finish_one(reader, both)                              # equal requests: equal rows
    got = join(run_ranks(rank, 2, backend="local"))
    want = alone(chunks(0, 12))
    assert {p for _, _, p in got} == {8, 9, 10, 11}
    assert all(torch.equal(x, y) for k in got for x, y in zip(got[k], want[k]))

def test_the_same_pages_hold_other_content_in_the_next_batch():
    def rank(peers):
        reader, plans = bench(peers, FullView, [[(0, 0, 20)], [(1, 0, 20)]])
        pages = plans[0].page_tables
        again = dataclasses.replace(plans[1], page_tables=pages)
        return finish_one(reader, plans[0]), finish_one(reader, again)
    for which, said in enumerate(zip(*run_ranks(rank, 2, backend="local"))):
        assert same(join(said), alone([[(which, 0, 20)]]))

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stores", [{0}, {1}, {2}, {0, 2}, {1, 2}])
def test_a_layer_that_only_stores_moves_the_chunk_alone(kind, stores):
    if 0 in stores and 1 not in stores: stores = stores | {1}        # it has no selection to share
    batches = [[(0, 0, 13), (1, 0, 5)], [(0, 13, 20)]]
    def on_rank_0(only):
        return run_ranks(probe_reader, 3, kind, batches, "fp32", 4, frozenset(only), backend="local")[0]
    full, (got, received, predicted) = on_rank_0(()), on_rank_0(stores)
    assert received == predicted
    assert {n for n, *_ in got} == set(range(3)) - stores
    assert all(torch.equal(x, y) for k in got for x, y in zip(got[k], full[0][k]))
    for batch, sums, whole in zip(batches, received, full[1]):
        most = zigzag_split([Extend(request=q, start=a, stop=b) for q, a, b in batch], 3).max_rows
        for n, has in enumerate(PROBE_LAYERS):
            chunk = 2 * most * 4 * (16 + 8 * has)
            assert sums[n] == (chunk if n in stores or kind is Reader else whole[n]) and whole[n] >= chunk

def test_stored_bytes_do_not_depend_on_ranks_or_chunks():
    "Owners hold, page by page, what a single pool holds; nothing else was written"
    def rank(peers, kind, cuts):
        reader, plans = bench(peers, kind, chunks(*cuts))
        for plan in plans: finish_one(reader, plan)
        lay, table = reader.pool.layout, plans[-1].page_tables[0]
        mine = [j for j, p in enumerate(table) if lay.owner_of_page(p) == plans[-1].owner]
        assert all((b.pages[0] == POISON).all() for b in reader.pool.buffers if len(b.pages))
        return {(i, j): b.pages[lay.local_page_of(int(table[j]))].clone() for j in mine
                for i, b in enumerate(reader.pool.buffers) if len(b.pages)}
    want = run_ranks(rank, 1, Reader, (0, 30), backend="local")[0]
    for R, cuts in ((1, (0, 7, 30)), (2, (0, 30)), (3, (0, 7, 8, 30))):
        for kind in KINDS:
            got = run_ranks(rank, R, kind, cuts, backend="local")
            if kind is not Reader: assert sum(map(len, got)) == len(want)       # no page twice
            both = join(got)
            assert both.keys() == want.keys() and all(torch.equal(both[k], want[k]) for k in want)

def test_the_ledger_names_every_gather_in_order():
    def rank(peers):
        reader, (plan,) = bench(peers, FullView, [[(0, 0, 9)]])
        finish_one(reader, plan)
        entries = reader.world.ledger.entries
        assert {e.digest for e in entries} == {plan.digest} and {e.lane for e in entries} == {"main"}
        return [(e.layer, e.tag) for e in entries]
    tags = ["chunk.latent", "chunk.index", "view.index", "view.latent"]
    layer = {True: tags, False: ["chunk.latent", "view.latent"]}
    want = [(n, t) for n, has in enumerate(PROBE_LAYERS) for t in layer[has]]
    assert run_ranks(rank, 2, backend="local") == [want, want]

def test_two_equal_batches_swapped_on_one_rank_are_found():
    "Same sizes, other requests: the digest in the ledger tells"
    def rank(peers):
        reader, plans = bench(peers, FullView, [[(0, 0, 9)], [(1, 0, 9)]])
        for plan in plans[::-1] if reader.world.rank else plans: finish_one(reader, plan)
    with pytest.raises(OrderError, match="digest"): run_ranks(rank, 2, backend="local")


# -- nothing is mapped twice


class Made(TorchDispatchMode):
    "Integer tensors that are made while it is on"
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        fresh = isinstance(out, torch.Tensor) and not out.is_floating_point() and out.dtype != torch.uint8
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if fresh and out.untyped_storage().data_ptr() not in known: self.seen.append(str(func))
        return out

@pytest.mark.parametrize("kind", READERS.values(), ids=READERS)
def test_no_layer_makes_an_index_tensor_but_its_selection(kind):
    "With verbs that return what they have, a layer makes one tensor of integers: the positions picked"
    layers, lay = 3, PageLayout(cp_size=1, page_size=4)
    batch = [(0, 9, 21)]
    plan = probe_plan(batch, probe_pages([batch], lay), lay, 0, 1)
    pool = Pool(lay, has_index=(True, True, False), dims=PROBE_DIMS, format=format_of("fp32"), local_pages=8)
    ops = dataclasses.replace(REF, **{n: idle(getattr(REF, n)) for n in IDLE})
    reader = kind(IdleWorld(), pool, ops, Scratch(1 << 16), index_topk=8, v_dim=12, scale=1.)
    q, w, mine = torch.zeros(32, 16, 8), torch.zeros(32, 16), torch.zeros(32, 2, 16)
    def run():
        session, made = reader.open(plan), []
        for n in range(layers):
            rows = dict(latent=torch.zeros(32, 16)) | (dict(index=torch.zeros(32, 8)) if n < 2 else {})
            with Made() as m:
                run_to_end(session.put(n, **rows))
                if n < 2: picked = run_to_end(session.select(n, q, w))
                run_to_end(session.attend(n, mine, picked))
            made.append(m.seen)
        session.end()
        return made
    run()                                                            # verbs have answered once
    assert run() == [["aten.full.default"], ["aten.full.default"], []]

def test_the_count_sees_an_index_tensor():
    with Made() as m: torch.arange(3) + 1
    assert len(m.seen) == 2
