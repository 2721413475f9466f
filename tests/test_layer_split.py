"Whole layers on single ranks attend as many copies do, bit for bit; each rank receives what it should"
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkv.launch import run_ranks
from cpkv.laws import CapacityError, ConfigError, OrderError
from cpkv.layer_split import LayerSplit, capacity_ratio, layer_owners, layer_split_layers
from cpkv.layout import PageLayout
from cpkv.ops.table import REF
from cpkv.pool import POISON, Pool, format_of
from cpkv.reader import Reader, run_to_end
from cpkv.scratch import ALIGN, Scratch
from cpkv.shared_kv import (PROBE_DIMS, PROBE_LAYERS, FullView, probe_pages, probe_plan,
                            probe_reader, probe_steps, view_pages)
from cpkv.split import Extend, SPLITS, interleave_split, zigzag_split
from cpkv.world import Solo
from trials import alone, chunks, over, same

L = len(PROBE_LAYERS)

def bench(peers, batches, P=4, holds=None):
    "A poisoned pool of this rank's layers, a reader with room for two batches, their plans"
    world, lay = peers.world(), PageLayout(cp_size=1, page_size=P)
    pages = probe_pages(batches, lay)
    local = int(max(t.max() for t in pages.values())) + 1
    pool = Pool(lay, has_index=PROBE_LAYERS, dims=PROBE_DIMS, format=format_of("fp32"),
                holds=holds or LayerSplit.holds(L, world.size, world.rank), local_pages=local)
    pool.poison(range(local))
    arena = 3 * LayerSplit.scratch_bytes(pool, world.size, 128, 128)
    reader = LayerSplit(world, pool, REF, Scratch(arena), index_topk=8, v_dim=12, scale=0.25)
    return reader, [probe_plan(b, pages, lay, world.rank, world.size) for b in batches]

def finish_one(reader, plan):
    reader.scratch.arena.fill_(POISON)
    session = reader.open(plan)
    said = run_to_end(probe_steps(session, plan))
    session.end()
    return said

def join(outs): return {k: v for said in outs for k, v in said.items()}


# -- layers and room


@given(st.integers(1, 100), st.integers(1, 20))
def test_every_layer_has_one_owner_in_ranges_that_differ_by_one(layers, ranks):
    owners = layer_owners(layers, ranks)
    size = np.bincount(owners, minlength=ranks)
    base, extra = divmod(layers, ranks)
    assert len(owners) == layers and list(owners) == sorted(owners)
    assert size.tolist() == [base + (r < extra) for r in range(ranks)]
    assert size.max() == layer_split_layers(layers, ranks)
    held = [LayerSplit.holds(layers, ranks, r) for r in range(ranks)]
    assert [[r for r in range(ranks) if held[r][n]] for n in range(layers)] == [[o] for o in owners]

@pytest.mark.parametrize("layers,ranks,want", [(78, 8, 7.09), (61, 8, 6.78), (78, 1, 78 / 79),
                                               (8, 8, 4), (1, 8, .5), (64, 8, 64 / 9)])
def test_capacity_charges_one_layer_of_another_rank(layers, ranks, want):
    assert capacity_ratio(layers, ranks) == pytest.approx(want, abs=.005)

@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 9))
def test_pools_of_all_ranks_hold_one_copy_together(has_index, ranks):
    def pool(holds): return Pool(PageLayout(cp_size=1, page_size=2), has_index=has_index,
                                 dims=PROBE_DIMS, format=format_of("fp32"), local_pages=3, holds=holds)
    one, n = pool(None).num_bytes(), len(has_index)
    each = [pool(LayerSplit.holds(n, ranks, r)).num_bytes() for r in range(ranks)]
    assert sum(each) == one
    assert max(each) <= layer_split_layers(n, ranks) * 3 * 2 * (64 + 32)

def test_scratch_is_one_layer_of_pages_and_a_chunk_the_same_on_all_ranks():
    need = set()
    for r in range(8):                                               # 5 of them own nothing
        pool = Pool(PageLayout(cp_size=1, page_size=4), has_index=PROBE_LAYERS, dims=PROBE_DIMS,
                    format=format_of("fp32"), local_pages=40, holds=LayerSplit.holds(L, 8, r))
        need.add(LayerSplit.scratch_bytes(pool, 8, 100, 30, 3))
        most = LayerSplit.scratch_bytes(pool, 8, 10**6, 30, 3)
    assert need == {96 * (8 * (4 + 6) + 4 * (25 + 3)) + 4 * ALIGN}
    assert most == 96 * (8 * (4 + 6) + 4 * 40) + 4 * ALIGN           # never more than the pool

def test_a_batch_that_does_not_fit_is_refused_before_anything_is_sent():
    def rank(peers):
        reader, plans = bench(peers, [[(0, 0, 64)]])
        reader.scratch = Scratch(LayerSplit.scratch_bytes(reader.pool, 2, 32, 32))
        try: reader.open(plans[0])
        finally: assert reader.world.ledger.entries == []
    with pytest.raises(CapacityError, match="does not fit"): run_ranks(rank, 2, backend="local")

@pytest.mark.parametrize("holds", [(True, True, False), (False,) * 3])
def test_a_pool_of_other_layers_is_refused(holds):
    class One:
        def world(self): return Solo()
    with pytest.raises(ConfigError, match="layer_split") as e: bench(One(), chunks(0, 4), holds=holds)
    assert e.value.facts["owns"] == [0, 1, 2] and e.value.facts["rank"] == 0

def test_a_whole_pool_on_one_of_two_ranks_is_refused():
    def rank(peers): bench(peers, chunks(0, 4), holds=(True,) * 3)
    with pytest.raises(ConfigError, match=r"keeps=\[0, 1, 2\], owns="):
        run_ranks(rank, 2, backend="local")


# -- same bits


@pytest.mark.parametrize("P,fmt", [(1, "fp32"), (4, "bf16"), (4, "fp8"), (16, "fp8_packed")])
def test_same_bits_over_ranks_and_chunks(P, fmt):
    cuts = itertools.cycle([(0, 13, 14, 37), (0, 5, 36, 37), (0, 37)])
    oracle = over(1, Reader, chunks(0, 37), fmt, P)
    for R, cut, split in zip((1, 2, 3, 4, 5, 8), cuts, itertools.cycle(SPLITS.values())):
        assert same(over(R, LayerSplit, chunks(*cut), fmt, P, frozenset(), None, split), oracle), (R, cut)

def test_boundary_lengths():
    P = 4
    for R, n in itertools.product((2, 3), (1, P - 1, P, P + 1, 2 * P * 3)):
        assert same(over(R, LayerSplit, chunks(0, 5, 5 + n)), over(1, Reader, chunks(0, 5 + n))), (R, n)

@st.composite
def conversations(draw):
    "Requests cut in chunks, dealt over batches in any order"
    left = {q: [0, *sorted(draw(st.sets(st.integers(1, 30), min_size=1, max_size=3)))]
            for q in range(draw(st.integers(1, 3)))}
    batches = []
    while any(len(cuts) > 1 for cuts in left.values()):
        able = [q for q, cuts in left.items() if len(cuts) > 1]
        go = draw(st.permutations(able))[:draw(st.integers(1, len(able)))]
        batches.append([(q, left[q][0], left[q][1]) for q in go])
        for q in go: del left[q][0]
    return batches

@settings(max_examples=8)
@given(conversations(), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 4, 16]),
       st.sampled_from([*SPLITS.values()]), st.integers(0, 9))
def test_any_batches_equal_each_request_alone(batches, R, P, split, seed):
    pages = probe_pages(batches, PageLayout(cp_size=1, page_size=P))
    ids = np.random.default_rng(seed).permutation(np.concatenate(list(pages.values())))
    pages = dict(zip(pages, np.split(ids, np.cumsum([len(t) for t in pages.values()])[:-1])))
    assert same(over(R, LayerSplit, batches, "fp32", P, frozenset(), pages, split), alone(batches, "fp32", P))

BATCHES = [[(0, 0, 13), (1, 0, 5)], [(2, 0, 1), (0, 13, 37), (1, 5, 6)]]

def test_ranks_that_run_in_another_order_say_the_same():
    want = alone(BATCHES)
    for seed in (1, 2, 3): assert same(over(3, LayerSplit, BATCHES, seed=seed), want)

def test_real_processes_say_the_same():
    assert same(over(2, LayerSplit, BATCHES, backend="gloo", debug=True), alone(BATCHES))


# -- what is stored, what travels


@pytest.mark.parametrize("R", [2, 3, 8])
def test_the_owner_alone_stores_and_stores_what_one_pool_holds(R):
    def rank(peers, cuts):
        reader, plans = bench(peers, chunks(*cuts))
        for plan in plans: finish_one(reader, plan)
        assert all((b.pages[0] == POISON).all() for b in reader.pool.buffers if len(b.pages))
        return {i: b.pages.clone() for i, b in enumerate(reader.pool.buffers) if len(b.pages)}
    (want,) = run_ranks(rank, 1, (0, 30), backend="local")
    got = run_ranks(rank, R, (0, 7, 8, 30), backend="local")
    assert sum(map(len, got)) == len(want) == L + sum(PROBE_LAYERS)
    both = join(got)
    assert all(torch.equal(both[i], want[i]) for i in want)

def test_bytes_by_hand():
    "Rows of 64 + 32 bytes, pages of 4; 3 ranks, layer n on rank n; layer 1 has no index"
    got = run_ranks(probe_reader, 3, LayerSplit, chunks(0, 16, 21), backend="local")
    for rank, (_, received, _) in enumerate(got):
        for n, row in enumerate((96, 64, 96)):
            chunk, pages = 2 * 2 * row, 6 * 4 * row                  # 21 tokens on 6 pages, each once
            assert received[1][n] == chunk + pages * (rank != n)

@pytest.mark.parametrize("R", [2, 3, 5])
def test_the_mean_is_that_of_the_full_view_without_its_filler(R):
    "Rows and pages that divide by the ranks: no filler, so the sums are equal to the byte"
    batch = chunks(0, 8 * R, 12 * R)
    split, view = ([said[1][1] for said in run_ranks(probe_reader, R, kind, batch, backend="local")]
                   for kind in (LayerSplit, FullView))
    for n in range(L):
        assert sum(r[n] for r in split) == sum(r[n] for r in view)
        assert len({r[n] for r in split}) == 2 and len({r[n] for r in view}) == 1

def test_pages_that_requests_share_travel_once():
    def rank(peers):
        reader, (first,) = bench(peers, chunks(0, 20))
        lay, table = reader.pool.layout, first.page_tables[0]
        pages = {0: table, 1: np.append(table[:2], table[3:])}
        both = probe_plan([(0, 8, 12), (1, 8, 11)], pages, lay, first.rank, 2)
        finish_one(reader, probe_plan([(0, 0, 8)], pages, lay, first.rank, 2))
        mark = reader.world.ledger.mark()
        finish_one(reader, both)
        sent = [e for e in reader.world.ledger.since(mark).entries if e.op == "broadcast"]
        assert view_pages(both).max_pages == 4                       # 2 shared, 1 each
        assert {e.shape for e in sent} == {(4, 4 * 64), (4, 4 * 32)}
    run_ranks(rank, 2, backend="local")

@pytest.mark.parametrize("stores", [{2}, {1, 2}, {0, 1}, {0, 1, 2}])
def test_a_layer_that_only_stores_moves_the_chunk_alone(stores):
    full, got = (run_ranks(probe_reader, 3, LayerSplit, BATCHES, "fp32", 4, frozenset(s), backend="local")
                 for s in ((), stores))
    both = join(said for said, *_ in full)
    for rank, (said, received, predicted) in enumerate(got):
        assert received == predicted and {n for n, *_ in said} == set(range(L)) - stores
        assert all(torch.equal(x, y) for k in said for x, y in zip(said[k], both[k]))
        for batch, sums, whole in zip(BATCHES, received, full[rank][1]):
            most = zigzag_split([Extend(request=q, start=a, stop=b) for q, a, b in batch], 3).max_rows
            for n, has in enumerate(PROBE_LAYERS):
                chunk = 2 * most * 4 * (16 + 8 * has)
                assert sums[n] == (chunk if n in stores else whole[n])
                assert (whole[n] == chunk) == (rank == n)

def test_rows_of_a_layer_that_only_stored_are_read_later():
    "What a draft's layer was given while nothing was sampled is there when something is"
    def rank(peers):
        reader, plans = bench(peers, chunks(0, 13, 20))
        session = reader.open(plans[0], frozenset([1, 2]))
        run_to_end(probe_steps(session, plans[0]))
        session.end()
        return finish_one(reader, plans[1])
    want = {k: v for k, v in alone(chunks(0, 20)).items() if k[2] >= 13}
    for R in (1, 2, 3): assert same(join(run_ranks(rank, R, backend="local")), want)

def test_the_ledger_names_every_collective_in_order_and_its_source():
    def rank(peers):
        reader, (plan,) = bench(peers, chunks(0, 9))
        finish_one(reader, plan)
        entries = reader.world.ledger.entries
        assert {e.digest for e in entries} == {plan.digest} and {e.lane for e in entries} == {"main"}
        return [(e.layer, e.op, e.tag, e.src) for e in entries]
    def layer(n, src):
        parts = ["latent", "index"][:1 + PROBE_LAYERS[n]]
        return [(n, "all_gather", f"chunk.{c}", -1) for c in parts] + [
            (n, "broadcast", f"view.{c}", src) for c in parts[::-1]]
    for R in (1, 2, 3, 8):
        want = [step for n, src in enumerate(layer_owners(L, R)) for step in layer(n, src)]
        assert run_ranks(rank, R, backend="local") == [want] * R

def test_two_equal_batches_swapped_on_one_rank_are_found():
    def rank(peers):
        reader, plans = bench(peers, [[(0, 0, 9)], [(1, 0, 9)]])
        for plan in plans[::-1] if reader.world.rank else plans: finish_one(reader, plan)
    with pytest.raises(OrderError, match="digest"): run_ranks(rank, 2, backend="local")


# -- aborts, two sessions


@pytest.mark.parametrize("R", [1, 2, 3])
def test_aborted_at_any_yield_and_run_again(R):
    batches = [[(0, 0, 9), (1, 0, 2)]]
    def rank(peers):
        reader, (plan,) = bench(peers, batches)
        arena, outs, k = len(reader.scratch.arena), [], 0
        while True:
            reader.scratch.arena.fill_(POISON)
            session = reader.open(plan)
            steps = probe_steps(session, plan)
            try:
                for _ in range(k + 1): next(steps)
            except StopIteration: break
            session.abort()
            assert reader.scratch.free_bytes == arena and not reader.world.pending
            outs.append(finish_one(reader, plan))
            k += 1
        session.end()
        assert reader.scratch.free_bytes == arena and all(same(o, outs[0]) for o in outs)
        return outs[0], k, reader.world.ledger.lines("main")
    got = run_ranks(rank, R, backend="local")
    assert [k for _, k, _ in got] == [sum(2 + has for has in PROBE_LAYERS)] * R
    assert all(lines == got[0][2] for *_, lines in got)
    assert same(join(said for said, *_ in got), alone(batches))

def test_two_sessions_alternate():
    batches = [[(0, 0, 23)], [(1, 0, 9), (2, 0, 3)]]
    def rank(peers):
        reader, plans = bench(peers, batches)
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
    for R in (2, 3): assert same(join(run_ranks(rank, R, backend="local")), alone(batches))

def test_the_trace_tells_writes_of_owned_layers_alone():
    def rank(peers):
        world = peers.world()
        class Once:
            def world(self): return world
        reader, (plan,) = bench(Once(), chunks(0, 9))
        finish_one(reader, plan)
        return sorted({e["layer"] for e in world.trace.ring if e["kind"] == "write"})
    assert run_ranks(rank, 2, backend="local", debug=True) == [[0, 1], [2]]

def test_the_interleaved_split_needs_nothing_else():
    got = over(4, LayerSplit, BATCHES, "fp32", 4, frozenset(), None, interleave_split)
    assert same(got, alone(BATCHES))
