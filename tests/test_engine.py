"""One request and batches through the engine: same bits by every path, one holder a page, all back"""
from functools import partial

import numpy as np
import pytest
import torch

from cpkv.alloc import Holder
from cpkv.engine import Engine, generate
from cpkv.launch import run_ranks
from cpkv.laws import CapacityError, InputError, OrderError, ResidencyError
from cpkv.model import TINY, Model, parse_config, random_weights
from cpkv.ops.table import REF
from cpkv.request import EngineConfig
from cpkv.world import Solo

CONFIG = parse_config(TINY, layers=3)
MODEL = Model(CONFIG, random_weights(CONFIG, seed=1), REF)
PROMPT = np.random.default_rng(2).integers(0, 256, 70)


def engine_of(world, P=16, chunk=48, tokens=256, reader="full_view", fmt="fp32", model=MODEL, **more):
    sizes = EngineConfig(page_size=P, chunk=chunk, device_tokens=tokens, max_tokens=tokens,
                         reader=reader, format=fmt, **more)
    engine = Engine(world, model, sizes)
    engine.pool.poison()
    return engine

def local(fn, ranks, *args, **kwargs): return run_ranks(fn, ranks, *args, backend="local", **kwargs)

def talk(peers, P, chunk, fmt):
    engine = engine_of(peers.world(), P, chunk, fmt=fmt)
    out = generate(engine, 0, PROMPT, 3)
    warm = generate(engine, 1, PROMPT, 3)
    return out, warm, engine.leaked_pages()

@pytest.fixture(scope="module")
def oracle():
    "One rank, replicated, one chunk, by format"
    torch.set_num_threads(1)
    return {f: generate(engine_of(Solo(), chunk=1000, reader="replicated", fmt=f), 0, PROMPT, 3)
            for f in ("fp32", "bf16")}

def same(a, b): return a[0] == b[0] and torch.equal(a[1], b[1])


@pytest.mark.parametrize("ranks,P,chunk,fmt", [(1, 16, 1, "fp32"), (2, 1, 32, "fp32"), (2, 64, 3, "fp32"),
    (3, 16, 48, "bf16"), (4, 4, 1000, "fp32"), (5, 16, 16, "fp32"), (8, 4, 64, "bf16")])
def test_same_request_same_bits(oracle, ranks, P, chunk, fmt):
    for cold, warm, leaked in local(talk, ranks, P, chunk, fmt):
        assert same(cold, oracle[fmt]) and same(warm, oracle[fmt]) and leaked == 0

def lengths(peers, sizes):
    "Logits of prompts of every boundary length, after a page of history and without"
    engine = engine_of(peers.world(), P=4, chunk=8, tokens=128)
    seed = engine.begin(999, PROMPT[:5])
    engine.prefill(seed)
    engine.finish(seed)
    out = []
    for n in sizes:
        r = engine.begin(n, PROMPT[:n])
        out.append((r.cached, engine.prefill(r)))
        engine.abort(r)
    return out, engine.leaked_pages()

def test_boundary_lengths():
    P, R, chunk = 4, 3, 8
    sizes = sorted({1, P - 1, P, P + 1, 2 * P, R * P - 1, R * P, R * P + 1, 2 * R * P, chunk - 1,
                    chunk, chunk + 1, P + chunk, P + chunk + 1})
    want, _ = local(lengths, 1, sizes)[0]
    for got, leaked in local(lengths, R, sizes):
        assert [c for c, _ in got] == [c for c, _ in want] == [4 if n > 4 else 0 for n in sizes]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got, want)) and leaked == 0

def batch(peers, prompts):
    engine = engine_of(peers.world(), chunk=1000)
    rs = [engine.begin(i, p) for i, p in enumerate(prompts)]
    got = engine.compute([(r, len(r.tokens)) for r in rs], captures=[i == 1 for i in range(len(rs))])
    for r in rs: engine.abort(r)
    return [c.logits for c in got], got[1].hidden, engine.leaked_pages()

def test_a_batch_is_its_requests():
    prompts = [PROMPT[:1], PROMPT[:33], PROMPT[10:50], PROMPT[:7], PROMPT[3:5]]
    alone = [local(batch, 1, [p, p])[0][0][0] for p in prompts]
    hidden = local(batch, 1, prompts)[0][1]
    for ranks in (2, 3, 8):
        for logits, rows, leaked in local(batch, ranks, prompts):
            assert all(torch.equal(a, b) for a, b in zip(logits, alone))
            assert torch.equal(rows, hidden) and leaked == 0

def abort_at(peers, steps):
    engine = engine_of(peers.world(), P=4, chunk=16, tokens=96)
    for n in range(steps):
        r = engine.begin(n, PROMPT)
        for _ in range(n): engine.step(r)
        engine.abort(r)
        engine.check()
        assert sum(engine.alloc.count(Holder.REQUEST)) == 0
    return generate(engine, 99, PROMPT, 3), engine.leaked_pages()

def test_abort_after_every_chunk(oracle):
    for out, leaked in local(abort_at, 2, 5): assert same(out, oracle["fp32"]) and leaked == 0

def test_published_then_aborted_pages_have_one_holder(oracle):
    "Public report 38319: pages of a published prefix must not become free with the abort"
    engine = engine_of(Solo(), P=4, chunk=8, tokens=96)
    r = engine.begin(0, PROMPT[:24])
    engine.step(r), engine.step(r)
    engine.publish(r)
    engine.abort(r)
    engine.check()
    assert engine.tree.num_pages == 4
    other = engine.begin(1, PROMPT[::-1])
    engine.prefill(other)
    engine.finish(other)
    assert same(generate(engine, 2, PROMPT, 3), oracle["fp32"])
    assert engine.leaked_pages() == 0

def test_whole_prompt_cached_still_computes_one_token():
    "Public report 17999: hit 4 for 8 tokens and 8 for 9, equal output each time"
    engine, outs = engine_of(Solo(), P=4), []
    for i, (n, hit) in enumerate([(8, 0), (8, 4), (8, 4), (9, 8)]):
        r = engine.begin(i, PROMPT[:n])
        assert r.cached == hit
        outs.append(engine.prefill(r))
        engine.finish(r)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])

def test_fault_in_a_forward_leaves_everything_in_place(monkeypatch):
    engine = engine_of(Solo())
    r = engine.begin(0, PROMPT)
    calls = iter(range(100))
    real = engine.model.ops.sparse_mla
    class Broken:
        def __getattr__(self, name): return getattr(REF, name)
        def sparse_mla(self, *a, **k):
            if next(calls) == 1: raise RuntimeError("injected")
            return real(*a, **k)
    monkeypatch.setattr(engine.reader, "ops", Broken())
    with pytest.raises(RuntimeError, match="injected"): engine.step(r)
    assert engine.scratch.free_bytes == len(engine.scratch.arena)
    assert r.computed == 0
    engine.abort(r)
    assert engine.leaked_pages() == 0

def test_a_lost_page_is_found():
    engine = engine_of(Solo())
    r = engine.begin(0, PROMPT)
    engine.prefill(r)
    r.pages = r.pages[1:]
    engine.abort(r)
    assert engine.leaked_pages() == 1

@pytest.mark.parametrize("error,match,tokens", [(InputError, "empty", []), (InputError, "outside", [256]),
    (InputError, "outside", [-1]), (CapacityError, "longer", [1] * 257)])
def test_prompt_refuses(error, match, tokens):
    engine = engine_of(Solo())
    with pytest.raises(error, match=match): engine.begin(0, np.array(tokens, np.int64))
    assert engine.leaked_pages() == 0

def stray(peers, what):
    engine = engine_of(peers.world())
    if what == "tokens": engine.prefill(engine.begin(0, PROMPT if peers.rank else PROMPT[::-1]))
    elif what == "request": engine.prefill(engine.begin(peers.rank, PROMPT))
    elif what == "pages":
        if peers.rank: engine.alloc.take([np.array([1])])
        engine.prefill(engine.begin(0, PROMPT))
    elif what == "captures":
        r = engine.begin(0, PROMPT)
        engine.compute([(r, 40)], captures=[peers.rank == 0])

@pytest.mark.parametrize("what", ["tokens", "request", "pages", "captures"])
def test_ranks_that_differ_are_named_before_the_forward(what):
    with pytest.raises(OrderError, match="different plans"): local(stray, 2, what)

def bytes_of(peers):
    engine = engine_of(peers.world(), P=4, chunk=20)
    r = engine.begin(0, PROMPT)
    engine.prefill(r)
    engine.finish(r)
    return engine.world.ledger.received(), dict(engine.predicted)

@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_bytes_are_predicted(ranks):
    for got, predicted in local(bytes_of, ranks): assert got == predicted


# -- refusals before any effect, with request and numbers


def test_a_batch_that_no_class_can_hold_is_refused_whole():
    "Dealt round, one class is short: the others stay as they are, and the message names the requests"
    def rank(peers):
        engine = engine_of(peers.world(), P=4, chunk=1000, tokens=64, placement="cyclic")
        engine.alloc.take([np.ones(7, np.int64)])                    # rank 1 has one page left, rank 0 eight
        rs = [engine.begin(i, PROMPT[:16]) for i in (5, 6)]
        before = engine.alloc.free_by_class
        with pytest.raises(CapacityError, match=r"class is short.*requests=\[5, 6\]") as e: engine.compute([(r, 16) for r in rs])
        facts = e.value.facts
        assert facts["requests"] == [5, 6] and facts["need"] == [4, 4] and facts["free"] == before == [8, 1]
        assert facts["rank"] == peers.rank and all(len(r.pages) == 0 for r in rs)
        return len(engine.world.ledger.entries)
    assert local(rank, 2) == [0, 0]

def test_under_compute_owner_a_page_that_is_free_can_be_used():
    "Too few pages where they would be computed: the batch writes through the filter, wherever there is room"
    def rank(peers):
        engine = engine_of(peers.world(), P=4, chunk=1000, tokens=64)
        lost = engine.alloc.take([np.ones(7, np.int64)])[0]
        a, b = (engine.begin(i, PROMPT[:16]) for i in (5, 6))
        ready = engine.take_pages([(a, 16), (b, 16)])
        out = engine.run(ready)
        assert not ready.direct and not ready.split.aligned and sum(engine.alloc.free_by_class) == 1
        a.tokens = np.append(a.tokens, np.int32(1))
        engine.step(a)                                               # the last page, of the only class that has one
        with pytest.raises(CapacityError, match="need=.*free=.0, 0."):
            b.tokens = np.append(b.tokens, np.int32(1))
            engine.step(b)
        for r in (a, b): engine.abort(r)
        engine.alloc.free(lost)
        return out[0].logits, engine.leaked_pages()
    alone = engine_of(Solo(), P=4, chunk=1000, reader="replicated")
    want = alone.prefill(alone.begin(0, PROMPT[:16]))
    assert all(torch.equal(x, want) and leaked == 0 for x, leaked in local(rank, 2))

def test_a_prefix_whose_pages_are_not_there_is_refused_before_the_forward():
    engine = engine_of(Solo(), P=4, chunk=1000)
    r = engine.begin(3, PROMPT[:9])
    engine.prefill(r)
    r.tokens = np.append(r.tokens, np.int32(1))
    engine.alloc.free(r.pages[:1])                                   # somebody gave away what it stands on
    before = len(engine.world.ledger.entries)
    with pytest.raises(ResidencyError, match="not resident") as e: engine.step(r)
    assert (e.value.facts["request"], e.value.facts["pages"]) == (3, r.pages[:1].tolist())
    assert len(engine.world.ledger.entries) == before and r.computed == 9

@pytest.mark.slow
def test_32k_tokens_in_chunks_with_hits_in_the_tree():
    "Two ranks, pages of 64, chunks of 2,048: the second prompt finds 24K tokens of the first"
    long = np.random.default_rng(3).integers(0, 256, 32 << 10)
    other = np.append(long[:24 << 10], long[:512])
    def rank(peers, **more):
        engine = engine_of(peers.world(), P=64, chunk=2048, tokens=64 << 10, fmt="fp8_packed", **more)
        out = [generate(engine, i, p, 2) for i, p in enumerate((long, other))]
        hit = engine.tree.match(engine.tree.reusable(other)).num_tokens
        return out, hit, engine.leaked_pages()
    want, *_ = local(partial(rank, reader="replicated"), 1)[0]
    for out, hit, leaked in local(partial(rank, reader="chunk_reuse"), 2):
        assert all(same(a, b) for a, b in zip(out, want)) and hit >= 24 << 10 and leaked == 0

def test_a_step_of_more_than_a_chunk_is_refused_before_any_effect():
    engine = engine_of(Solo(), P=16, chunk=32)
    rs = [engine.begin(i, PROMPT[:20]) for i in range(2)]
    before = engine.alloc.free_by_class
    with pytest.raises(InputError, match="a chunk at most") as e: engine.compute([(r, 20) for r in rs])
    assert e.value.facts | dict(rank=0) == dict(tokens=40, chunk=32, requests=[0, 1], rank=0)
    assert engine.alloc.free_by_class == before
    for r in rs: engine.abort(r)
    assert engine.leaked_pages() == 0
