"A session takes all that it needs, refuses what is not due, and gives everything back"
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpkv.all_gather import ForwardPlan
from cpkv.compute_owner import split_batch
from cpkv.launch import run_ranks
from cpkv.laws import CapacityError, ConfigError, LeaseError, OrderError, PageIdError
from cpkv.layout import PageLayout
from cpkv.ops.table import REF
from cpkv.pool import FORMATS, POISON, PayloadDims, Pool
from cpkv.reader import Reader, drive, most_rows, run_to_end
from cpkv.scratch import Scratch
from cpkv.shared_kv import FullView
from cpkv.split import Extend, zigzag_split
from cpkv.world import Handle, Solo

DIMS, K, P, ARENA = PayloadDims(latent=12, rope=4, index=8), 8, 4, 1 << 20


def plan_for(start=0, stop=23, *, ranks=1, rank=0, cp=1, owner=0, page_size=P, first=None):
    lay = PageLayout(cp_size=cp, page_size=page_size)
    ext, first = [Extend(request=0, start=start, stop=stop)], cp if first is None else first
    return ForwardPlan(split=zigzag_split(ext, ranks), layout=lay, rank=rank, owner=owner,
                       page_tables=(np.arange(first, first + lay.num_pages(stop)),),
                       tokens=(np.arange(stop),), samples=(False,))

def reader_for(kind=Reader, world=None, has_index=(True, False), arena=ARENA, local_pages=8, cp=1):
    pool = Pool(PageLayout(cp_size=cp, page_size=P), has_index=has_index, dims=DIMS,
                format=FORMATS["fp32"], local_pages=local_pages)
    return kind(world or Solo(), pool, REF, Scratch(arena), index_topk=K, v_dim=12, scale=0.25)

def rows(D=16, T=32): return torch.randn(T, D)
def put(s, layer=0): drive(s, layer, **(dict(latent=rows()) | ({} if layer else dict(index=rows(8)))))
def select(s, layer=0): return run_to_end(s.select(layer, torch.randn(32, 16, 8), rows(16)))
def attend(s, picked, layer=0): return run_to_end(s.attend(layer, torch.randn(32, 2, 16), picked))
def finish(s, layer=0): run_to_end(s.finish(layer))

def whole(s):
    "Every step of a session of two layers"
    put(s, 0)
    picked = select(s, 0)
    attend(s, picked, 0)
    put(s, 1)
    attend(s, picked, 1)
    return s


NONE = torch.full((32, K), -1, dtype=torch.int32)  # a selection of nothing

@given(st.integers(1, 8), st.sampled_from([1, 4, 16]), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)),
                                                              min_size=1, max_size=6), st.integers(0, 3))
def test_no_batch_has_more_rows_than_its_scratch_was_made_for(R, P, pairs, seed):
    ext = [Extend(request=i, start=h, stop=h + n) for i, (h, n) in enumerate(pairs)]
    chunk, free = sum(n for _, n in pairs), np.random.default_rng(seed).integers(0, 9, R).tolist()
    for name, grain in (("zigzag", 1), ("interleave", 1), ("page", P)):
        split = split_batch(name, ext, R, P, free)
        assert R * split.max_rows <= most_rows(R, chunk, len(pairs), grain) <= R * chunk
        if name == "page" and not split.aligned:      # then cut by tokens, and that is covered too
            assert R * split.max_rows <= most_rows(R, chunk, len(pairs), 1)

def begin(s): next(s.put(0, latent=rows(), index=rows(8)))

STEPS = [
    ("put twice", lambda s: [put(s), put(s)], "step=put, due=select"),
    ("select before put", lambda s: select(s), "step=select, due=put"),
    ("attend before select", lambda s: [put(s), attend(s, NONE)], "step=attend, due=select"),
    ("attend before put", lambda s: attend(s, NONE), "step=attend, due=put"),
    ("select twice", lambda s: [put(s), select(s), select(s)], "step=select, due=attend"),
    ("select without an indexer", lambda s: [whole(s).due.update({1: "put"}), put(s, 1), select(s, 1)],
     "step=select, due=attend"),
    ("another layer while one is open", lambda s: [put(s), put(s, 1)], "open_layer=0"),
    ("a step left in the middle", lambda s: [begin(s), select(s)], "due=running"),
    ("attend twice", lambda s: [whole(s), attend(s, NONE)], "step=attend, due=done"),
    ("finish a layer that reads", lambda s: [put(s), finish(s)], "step=finish, due=select"),
    ("no such layer", lambda s: put(s, 2), "due=nothing"),
    ("end before put", lambda s: s.end(), "work left"),
    ("end before attend", lambda s: [put(s), select(s), s.end()], "work left"),
    ("end in flight", lambda s: [begin(s), s.end()], "in_flight=2"),
]

@pytest.mark.parametrize("act,message", [s[1:] for s in STEPS], ids=[s[0] for s in STEPS])
def test_a_step_that_is_not_due_is_refused(act, message):
    reader = reader_for()
    session = reader.open(plan_for())
    with pytest.raises(OrderError, match=message): act(session)
    if not session.lease.is_ended: session.abort()
    assert reader.scratch.free_bytes == ARENA and not session.handles and not reader.world.pending


@pytest.mark.parametrize("act", [put, select, lambda s: attend(s, NONE), finish])
def test_a_session_that_ended_does_nothing(act):
    for close in (lambda s: s.abort(), lambda s: whole(s).end()):
        reader = reader_for()
        session = reader.open(plan_for())
        close(session)
        before = [b.pages.clone() for b in reader.pool.buffers]
        with pytest.raises(LeaseError, match="has ended"): act(session)
        with pytest.raises(LeaseError): session.end()
        with pytest.raises(LeaseError): session.abort()
        assert reader.scratch.free_bytes == ARENA
        assert all(torch.equal(a, b.pages) for a, b in zip(before, reader.pool.buffers))


@pytest.mark.parametrize("layer,given", [
    (0, dict(latent=rows())), (0, dict(index=rows(8))), (0, {}), (1, dict(latent=rows(), index=rows(8))),
    (0, dict(latent=rows(), index=rows(8), extra=rows())), (0, dict(latent=rows(15), index=rows(8))),
    (0, dict(latent=rows(T=23), index=rows(8, T=23))), (0, dict(latent=rows(T=64), index=rows(8, T=64)))],
    ids=["no index", "no latent", "nothing", "stray index", "stray component", "narrow", "unpadded", "long"])
def test_rows_that_are_not_the_layers_are_refused_before_they_travel(layer, given):
    reader = reader_for()
    session = reader.open(plan_for())
    with pytest.raises(OrderError, match="not those of the layer"): drive(session, layer, **given)
    assert reader.world.ledger.entries == []


@pytest.mark.parametrize("kind,world_cp,plan,message", [
    (Reader, 1, dict(ranks=2), "ranks=2 in the plan, 1 here"),
    (Reader, 1, dict(ranks=2, rank=1), "rank=1 in the plan"),
    (Reader, 1, dict(cp=2), "cp_size=2 in the plan, 1 here"),
    (Reader, 1, dict(page_size=8), "page_size=8 in the plan, 4 here"),
    (Reader, 2, {}, "pool=made for 2 ranks"),
    (FullView, 2, dict(cp=2, owner=1), "pool=made for 2 ranks"),
    (FullView, 1, dict(cp=2, owner=1), "owner=1 in the plan, 0 here")])
def test_a_plan_for_something_else_is_refused(kind, world_cp, plan, message):
    reader = reader_for(kind, cp=world_cp)
    with pytest.raises(ConfigError, match=message): reader.open(plan_for(**plan))
    assert reader.scratch.free_bytes == ARENA


def test_other_refusals_at_open_leave_no_trace():
    reader = reader_for(local_pages=6)
    with pytest.raises(PageIdError, match="past the pool"): reader.open(plan_for())
    reader.open(plan_for(stop=20)).abort()                           # five pages fit
    with pytest.raises(ConfigError, match="no such layer"): reader.open(plan_for(stop=20), frozenset({2}))
    small = reader_for(arena=100)
    with pytest.raises(CapacityError, match="does not fit"): small.open(plan_for())
    assert (reader.scratch.free_bytes, small.scratch.free_bytes) == (ARENA, 100)


def test_scratch_goes_back_if_the_upload_fails(monkeypatch):
    import cpkv.reader as module
    reader = reader_for()
    monkeypatch.setattr(module, "upload", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError): reader.open(plan_for())
    assert reader.scratch.free_bytes == ARENA


def test_abort_drains_everything_even_if_a_wait_fails():
    reader = reader_for()
    session = reader.open(plan_for())
    waited = []
    def handle(name, fails=False): return Handle(lambda: 1 / 0 if fails else waited.append(name))
    session.handles = {(0, "latent"): handle("a"), (0, "index"): handle("b", True),
                       (1, "latent"): handle("c")}
    with pytest.raises(ZeroDivisionError): session.abort()
    assert sorted(waited) == ["a", "c"] and not session.handles
    assert reader.scratch.free_bytes == ARENA


def test_a_selection_changed_in_place_is_read_anew():
    "The rows of a selection are remembered for layers that share it, not its old content"
    reader = reader_for(has_index=(True, False, False))
    session = reader.open(plan_for())
    put(session)
    picked = select(session)
    attend(session, picked)
    put(session, 1)
    q = torch.randn(32, 2, 16)
    one = run_to_end(session.attend(1, q, picked))
    known = session._locs[2]
    put(session, 2)
    assert session._locs_of(picked) is known
    picked[:, 0] = 0
    picked[:, 1:] = -1
    state = run_to_end(session.attend(2, q, picked))
    b = reader.pool.latent[2]
    first = b.fmt.decode(REF.gather_rows(b.pages, torch.tensor([P]), b.fmt, P))[0, :12]
    assert torch.equal(state.out[5], first.expand(2, 12)) and not torch.equal(state.out, one.out)


def changed_locs(before, pool):
    "Locs whose bytes are not what they were, by buffer"
    return [(a != b.pages).view(pool.local_pages, P, -1).any(2).flatten().nonzero().flatten().tolist()
            if len(b.pages) else [] for a, b in zip(before, pool.buffers)]

@pytest.mark.parametrize("R", [1, 2, 3])
def test_padded_rows_write_nothing_after_a_longer_batch(R):
    "12 tokens, then 3 in the same scratch: 3 rows of the pool change, and the sink never does"
    def rank(peers):
        world = peers.world()
        arena = Reader.scratch_bytes(pool, R, 16, 16)
        reader = reader_for(world=world, has_index=(True,), arena=arena)
        reader.pool.poison()
        changed = []
        for start, stop in ((0, 12), (12, 15)):
            before = [b.pages.clone() for b in reader.pool.buffers]
            plan = plan_for(start, stop, ranks=R, rank=world.rank)
            session, T = reader.open(plan), len(plan.rows.index)
            given = dict(latent=torch.full((T, 16), torch.nan), index=torch.full((T, 8), torch.nan))
            for x in given.values(): x[:plan.rows.num] = torch.randn(plan.rows.num, x.shape[1])
            drive(session, 0, **given)
            session.abort()
            changed.append(changed_locs(before, reader.pool))
        assert all((b.pages[0] == POISON).all() for b in reader.pool.buffers)
        for b in reader.pool.buffers:
            written = REF.gather_rows(b.pages, torch.arange(P, P + 15), b.fmt, P)
            assert b.fmt.decode(written).isfinite().all()
        return changed
    pool = reader_for(has_index=(True,)).pool
    for changed in run_ranks(rank, R, backend="local"):
        assert changed == [[[*range(P, P + 12)]] * 2, [[P + 12, P + 13, P + 14]] * 2]


def test_a_step_on_one_rank_alone_is_named():
    "Rank 1 finishes the layer that rank 0 reads: an error, not a hang"
    def rank(peers):
        world = peers.world()
        reader = reader_for(FullView, world, cp=2, has_index=(True,))
        plan = plan_for(ranks=2, rank=world.rank, cp=2, owner=world.rank)
        session = reader.open(plan, frozenset({0}) if world.rank else frozenset())
        put_T = len(plan.rows.index)
        drive(session, 0, latent=rows(T=put_T), index=rows(8, T=put_T))
        q, w = torch.randn(put_T, 16, 8), rows(16, T=put_T)
        if world.rank == 0: run_to_end(session.select(0, q, w))
        else: finish(session)
        session.end()
    with pytest.raises(OrderError, match="view.index"): run_ranks(rank, 2, backend="local", timeout=20)
