"""Many requests: company, arrivals, retraction, abort and rank count change nothing that is said"""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cpkv.engine import Engine
from cpkv.launch import run_ranks
from cpkv.laws import CapacityError, InputError, OrderError
from cpkv.model import TINY, Model, parse_config, random_weights
from cpkv.ops.table import REF
from cpkv.request import EngineConfig
from cpkv.sample import Sampling
from cpkv.schedule import Scheduler, Want
from cpkv.world import Solo

CONFIG = parse_config(TINY, layers=2)
MODEL = Model(CONFIG, random_weights(CONFIG, seed=1), REF)
TEXT = np.random.default_rng(3).integers(0, 256, 200)


def engine_of(world, chunk=32, tokens=512):
    return Engine(world, MODEL, EngineConfig(page_size=8, chunk=chunk, device_tokens=tokens,
                                              max_tokens=tokens, max_batch=4))

def facts(run): return run.output, run.logprobs, run.prompt_logprobs

PROMPTS = [TEXT[a:b] for a, b in ((0, 40), (0, 17), (0, 63), (5, 6), (0, 40), (90, 130), (0, 33))]
WANTS = [Want(max_new_tokens=n, sampling=s, logprob_start=l) for n, s, l in (
    (4, Sampling(), None), (3, Sampling(temperature=1.0, seed=5), None), (2, Sampling(), 20),
    (5, Sampling(temperature=0.7, top_p=0.9), None), (1, Sampling(), 0), (3, Sampling(), None), (4, Sampling(), None))]

@pytest.fixture(scope="module")
def alone():
    out = []
    for i, (p, w) in enumerate(zip(PROMPTS, WANTS)):
        s = Scheduler(engine_of(Solo(), chunk=1000))
        s.submit(i, p, w)
        out.append(facts(s.run()[i]))
    return out

def company(peers, arrivals, chunk, tokens, drop):
    "`arrivals[i]` is the step at which request i comes; `drop` is (request, step)"
    engine = engine_of(peers.world(), chunk, tokens)
    engine.pool.poison()
    s, out, retracted, most = Scheduler(engine), {}, 0, 0
    for step in range(400):
        for i, at in enumerate(arrivals):
            if at == step: s.submit(i, PROMPTS[i], WANTS[i])
        if drop and drop[1] == step: s.abort(drop[0])
        if step > max(arrivals) and not (s.waiting or s.running): break
        before = {run: run.r.computed for run in [*s.running, *s.waiting]}
        for run in s.step(): out[run.r.request] = facts(run); retracted += run.retracted
        grown = sum(max(run.r.computed - n, 0) for run, n in before.items() if run.r.computed and run in s.running)
        most = max(most, grown if not out else 0)
        engine.check()
    return out, retracted, engine.leaked_pages(), step

@given(arrivals=st.lists(st.integers(0, 6), min_size=7, max_size=7), chunk=st.sampled_from([8, 20, 64]),
       tokens=st.sampled_from([96, 128, 512]), ranks=st.sampled_from([1, 2, 3]),
       drop=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 9)))
@settings(max_examples=12)
def test_company_does_not_matter(alone, arrivals, chunk, tokens, ranks, drop):
    for out, _, leaked, step in run_ranks(company, ranks, arrivals, chunk, tokens, drop, backend="local"):
        assert step < 399 and leaked == 0
        assert all(got == alone[i] for i, got in out.items())
        assert set(range(7)) - set(out) <= ({drop[0]} if drop else set())

def test_a_small_pool_retracts_and_says_the_same(alone):
    out, retracted, leaked, _ = run_ranks(company, 2, [0] * 7, 64, 96, None, backend="local")[0]
    assert retracted > 0 and leaked == 0 and [out[i] for i in range(7)] == alone

def test_a_step_computes_at_most_its_budget():
    s = Scheduler(engine_of(Solo(), chunk=20))
    for i, p in enumerate(PROMPTS): s.submit(i, p, WANTS[i])
    seen, real = [], s.engine.run
    def spy(ready, *more):
        seen.append(sum(stop - r.computed for r, stop in ready.batch))
        return real(ready, *more)
    s.engine.run = spy
    s.run()
    assert max(seen) <= 20 and sum(seen) > 0

def test_two_waiting_prompts_in_chunks_of_the_step():
    "Public report 20018: `chunk` is tokens of a step over all requests; chunks that are not last end on pages"
    s = Scheduler(engine_of(Solo(), chunk=32))
    for i in range(2): s.submit(i, TEXT[i * 90:i * 90 + 50], Want(max_new_tokens=1))
    lens, real = [], s.engine.run
    def spy(ready, *more):
        lens.append([(r.request, stop - r.computed) for r, stop in ready.batch])
        return real(ready, *more)
    s.engine.run = spy
    s.run()
    assert lens == [[(0, 32)], [(0, 18), (1, 8)], [(1, 32)], [(1, 10)]]

def test_cached_tokens_are_counted_once():
    s = Scheduler(engine_of(Solo(), chunk=8))
    s.submit(0, PROMPTS[0], Want(max_new_tokens=1))
    first = s.run()[0]
    s.submit(1, PROMPTS[0], Want(max_new_tokens=1))
    assert (first.cached, s.run()[1].cached) == (0, 32)

def test_logprobs_see_rows_that_a_hit_would_skip():
    s = Scheduler(engine_of(Solo()))
    s.submit(0, PROMPTS[0], Want(max_new_tokens=1))
    s.run()
    s.submit(1, PROMPTS[0], Want(max_new_tokens=1, logprob_start=10))
    run = s.run()[1]
    assert run.cached == 8 and sorted(run.prompt_logprobs) == list(range(10, 40))

def test_a_request_that_outgrows_the_pool_ends_alone():
    s = Scheduler(engine_of(Solo(), tokens=64))
    with pytest.raises(CapacityError): s.submit(0, TEXT[:60], Want(max_new_tokens=6))
    s.submit(1, TEXT[:60], Want(max_new_tokens=5))
    assert len(s.run()[1].output) == 5 and s.engine.leaked_pages() == 0

def test_abort_twice_and_of_nobody():
    s = Scheduler(engine_of(Solo()))
    s.submit(0, PROMPTS[0])
    s.step()
    for _ in range(2): s.abort(0)
    s.abort(77)
    assert not s.running and s.engine.leaked_pages() == 0
    s.submit(0, PROMPTS[0], WANTS[0])  # the id is free again

@pytest.mark.parametrize("match,args", [("in use", (0, [1])), ("logprob_start", (1, [1], Want(logprob_start=1))),
                                        ("empty", (1, [])), ("vocabulary", (1, [999]))])
def test_submit_refuses(match, args):
    s = Scheduler(engine_of(Solo()))
    s.submit(0, [1])
    with pytest.raises(InputError, match=match): s.submit(*args)
    assert len(s.waiting) == 1

def stray_seed(peers):
    s = Scheduler(engine_of(peers.world()))
    s.submit(0, TEXT[:20], Want(max_new_tokens=1, sampling=Sampling(temperature=5.0, seed=peers.rank)))
    s.run()

def test_ranks_that_sample_differently_are_named():
    with pytest.raises(OrderError, match="sampled different"): run_ranks(stray_seed, 3, backend="local")
