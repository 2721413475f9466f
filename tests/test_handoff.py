"""Each page once, at its place, whole, or not at all"""
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpkv import handoff
from cpkv.alloc import Holder, PageAllocator
from cpkv.evidence import Trace
from cpkv.handoff import (HEADER, check_headers, draw_sends, handoff_bytes, pack_pages,
                          page_digests, place_pages, pool_facts, recv_pages, send_pages, send_plan)
from cpkv.launch import run_ranks
from cpkv.laws import CapacityError, ConfigError, ConservationError, PageIdError
from cpkv.layout import PageLayout
from cpkv.pool import FORMATS, PayloadDims, Pool

DIMS = PayloadDims(latent=6, rope=2, index=4)


def layout(cp: int, P: int) -> PageLayout: return PageLayout(cp_size=cp, page_size=P)

def make_pool(cp: int, P: int, local_pages: int, has_index=(True, False), fmt="fp32") -> Pool:
    return Pool(layout(cp, P), has_index=has_index, dims=DIMS, format=FORMATS[fmt],
                local_pages=local_pages)

def scribble(pool: Pool, seed: int) -> Pool:
    "Every byte random, sinks too"
    g = torch.Generator().manual_seed(seed)
    for b in pool.buffers: b.pages.random_(0, 256, generator=g)
    return pool


# -- the plan

@given(cp=st.integers(1, 9), start=st.integers(0, 99), data=st.data())
def test_every_page_goes_once_from_its_owner_to_its_position(cp, start, data):
    pages = data.draw(st.lists(st.integers(cp, cp + 60), unique=True, max_size=30))
    src = layout(cp, 4)
    sends = send_plan(src, layout(1, 4), pages, start)
    assert [s.rank for s in sends] == list(range(cp))     # a rank without pages is there too
    moved = {int(p): src.page_of(s.rank, int(n))
             for s in sends for n, p in zip(s.local, s.position)}
    assert moved == {start + i: p for i, p in enumerate(pages)}
    assert sum(len(s.local) for s in sends) == len(pages)

@pytest.mark.parametrize("dst,pages,error", [
    (layout(2, 4), [4], ConfigError), (layout(1, 8), [4], ConfigError),
    (layout(1, 4), [4, 3], PageIdError), (layout(1, 4), [0], PageIdError),
    (layout(1, 4), [-5], PageIdError), (layout(1, 4), [4, 9, 4], PageIdError)])
def test_the_plan_refuses(dst, pages, error):
    with pytest.raises(error): send_plan(layout(4, 4), dst, pages)

def test_the_picture_has_an_arrow_a_page_and_none_for_none():
    sends = send_plan(layout(3, 4), layout(1, 4), [5, 3, 8, 7])
    assert draw_sends(sends).html.count("h8l-4 7z") == 4
    assert draw_sends(send_plan(layout(3, 4), layout(1, 4), [])).html


# -- messages, without a network: what is sent is a list, what is received is taken from it

class Post:
    "Peers of one thread: a queue from each rank; recv number `fail_at` raises"
    def __init__(self, fail_at: int = -1):
        self.rank, self.queues, self.count, self.fail_at = 0, {}, 0, fail_at
        self.trace = Trace()

    def send(self, x, dst): self.queues.setdefault(self.rank, []).append(x.clone())

    def recv(self, out, src):
        if self.count == self.fail_at: raise TimeoutError("lost")
        self.count += 1
        x = self.queues[src].pop(0)
        assert (x.shape, x.dtype) == (out.shape, out.dtype)
        out.copy_(x)

def posted(cp, table, num_tokens, P=4, edit=None, fail_at=-1, fmt="fp32"):
    "A request in the post, and the pools that it comes from"
    post, pools = Post(fail_at), []
    sends = send_plan(layout(cp, P), layout(1, P), table)
    for r in range(cp):
        post.rank = r
        pools.append(scribble(make_pool(cp, P, 40, fmt=fmt), r))
        send_pages(post, pools[r], sends[r], cp, request=7, num_tokens=num_tokens, first_token=5,
                   total_pages=len(table))
    if edit: edit(post.queues)
    return post, pools

def receiver(P=4, local_pages=40, used=(), fmt="fp32"):
    pool = scribble(make_pool(1, P, local_pages, fmt=fmt), 99)
    alloc = PageAllocator(layout(1, P), local_pages)
    if used:     # a list with holes
        alloc.take([np.zeros(max(used), np.int64)])
        alloc.free([p for p in range(1, max(used) + 1) if p not in used])
    return pool, alloc

TABLE = np.array([9, 4, 11, 6, 3, 16])     # three ranks: 9 3 6 | 4 16 | 11

@pytest.mark.parametrize("cp,table,num_tokens", [
    (1, [], 0), (3, [], 0), (1, [1], 1), (3, [7], 4), (3, TABLE, 21), (3, TABLE, 24), (8, [8], 3),
    (2, range(2, 21), 76), (5, range(30, 4, -1), 101)])
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_what_arrives_is_what_was_sent(cp, table, num_tokens, fmt):
    table = np.array(table, np.int64)
    post, pools = posted(cp, table, num_tokens, fmt=fmt)
    pool, alloc = receiver(used=(2, 5), fmt=fmt)
    sink = [b.pages[:1].clone() for b in pool.buffers]
    got = recv_pages(post, pool, alloc, range(cp))
    want = {}
    for r in range(cp): want |= page_digests(pools[r], r, table, num_tokens)
    assert page_digests(pool, 0, got.pages, num_tokens) == want and len(want) == len(table)
    assert (got.request, got.num_tokens, got.first_token) == (7, num_tokens, 5)
    assert got.payload_bytes == handoff_bytes(len(table), pool.page_bytes())
    assert sum(alloc.count(Holder.REQUEST)) == len(table) + 2
    assert not sum(alloc.count(Holder.TRANSFER))
    assert all(torch.equal(b.pages[:1], s) for b, s in zip(pool.buffers, sink))
    assert not any(post.queues.values())     # nothing was left in the post
    alloc.check()

def test_sent_bytes_add_up_to_the_closed_form():
    post, pool = Post(), scribble(make_pool(3, 4, 40), 0)
    sent = [send_pages(post, pool, s, 3, request=0, num_tokens=24, first_token=0, total_pages=6)
            for s in send_plan(layout(3, 4), layout(1, 4), TABLE)]
    page = 4 * (8 + 4 + 8) * 4      # tokens * (latent, index, latent) * fp32
    assert sent == [3 * page, 2 * page, page] and sum(sent) == handoff_bytes(6, page)

def test_pages_are_held_as_transfer_until_the_last_byte(monkeypatch):
    post, _ = posted(3, TABLE, 24)
    pool, alloc = receiver()
    seen = []
    real = handoff.place_pages
    def place(*args):
        seen.append((sum(alloc.count(Holder.TRANSFER)), sum(alloc.count(Holder.REQUEST))))
        real(*args)
    monkeypatch.setattr(handoff, "place_pages", place)
    recv_pages(post, pool, alloc, range(3))
    assert seen == [(6, 0)] * 3

@pytest.mark.parametrize("k", range(9))     # 3 headers, 3 lists of positions, 3 bodies
def test_a_loss_at_any_moment_leaves_no_page_behind(k):
    post, _ = posted(3, TABLE, 24, fail_at=k)
    pool, alloc = receiver(used=(2, 5))
    before = alloc.free_by_class
    with pytest.raises(TimeoutError): recv_pages(post, pool, alloc, range(3))
    assert alloc.free_by_class == before
    assert not sum(alloc.count(Holder.TRANSFER)) and sum(alloc.count(Holder.REQUEST)) == 2
    alloc.check()

def test_without_a_loss_there_are_nine_messages():
    post, _ = posted(3, TABLE, 24, fail_at=9)
    recv_pages(post, *receiver(), range(3))
    assert post.count == 9

def set_header(rank, key, value):
    def edit(queues): queues[rank][0][HEADER.index(key)] = value
    return edit

def set_position(rank, i, value):
    def edit(queues): queues[rank][1][i] = value
    return edit

@pytest.mark.parametrize("edit,error", [
    (set_header(1, "request", 8), ConservationError),
    (set_header(2, "num_tokens", 23), ConservationError),
    (set_header(2, "first_token", 6), ConservationError),
    (set_header(0, "total_pages", 7), ConservationError),
    (set_header(1, "page_bytes", 1), ConfigError), (set_position(0, 1, 0), ConservationError),
    (set_position(0, 0, 6), ConservationError), (set_position(2, 0, -1), ConservationError)])
def test_announcements_that_do_not_add_up_cost_no_page(edit, error):
    post, _ = posted(3, TABLE, 24, edit=edit)
    pool, alloc = receiver()
    bytes_before = [b.pages.clone() for b in pool.buffers]
    with pytest.raises(error): recv_pages(post, pool, alloc, range(3))
    assert sum(alloc.count(Holder.FREE)) == 39
    assert all(torch.equal(b.pages, was) for b, was in zip(pool.buffers, bytes_before))

@pytest.mark.parametrize("num_tokens", [0, 20, 25, 1000])
def test_pages_must_fit_the_tokens(num_tokens):
    post, _ = posted(3, TABLE, num_tokens)
    with pytest.raises(ConservationError, match="cover the request once"):
        recv_pages(post, *receiver(), range(3))

def test_a_receiver_without_room_takes_nothing():
    post, _ = posted(3, TABLE, 24)
    pool, alloc = receiver(local_pages=6)     # five pages and the sink
    with pytest.raises(CapacityError): recv_pages(post, pool, alloc, range(3))
    assert alloc.free_by_class == [5]

def test_the_error_says_which_rank_differs():
    pool, positions = make_pool(1, 4, 2), [np.array([0]), np.array([1])]
    h = dict(zip(HEADER, (7, 8, 5, 2, 1, pool.page_bytes())))
    with pytest.raises(ConservationError) as e:
        check_headers(pool, [h, h | dict(first_token=6)], positions)
    assert e.value.facts["rank"] == 1 and e.value.facts["first_token"] == (5, 6)


# -- bytes

@given(st.permutations(range(1, 6)), st.integers(0, 5))
def test_place_undoes_pack(order, n):
    pool, other = scribble(make_pool(2, 3, 6), 1), scribble(make_pool(1, 3, 6), 2)
    local = np.array(order[:n], np.int64)
    packed = pack_pages(pool, local)
    assert packed.shape == (n, pool.page_bytes()) and packed.dtype == torch.uint8
    place_pages(other, local[::-1].copy(), packed.flip(0))
    for a, b in zip(pool.buffers, other.buffers):
        if len(a.pages): assert torch.equal(a.pages[local], b.pages[local])

@given(num_tokens=st.integers(1, 12), buffer=st.integers(0, 2), data=st.data())
def test_a_fingerprint_sees_every_byte_before_the_end_and_none_behind(num_tokens, buffer, data):
    pool, table = scribble(make_pool(1, 4, 4), 3), np.array([2, 3, 1])
    b = [x for x in pool.buffers if len(x.pages)][buffer]
    was = page_digests(pool, 0, table, num_tokens)
    i = data.draw(st.integers(0, 3 * b.page_bytes - 1))
    page, byte = divmod(i, b.page_bytes)
    b.pages[table[page], byte] ^= 1
    now = page_digests(pool, 0, table, num_tokens)
    inside = page * 4 + byte // b.fmt.row_bytes < num_tokens
    assert [p for p in was if was[p] != now[p]] == [page] * inside


# -- ranks

def meet(peers, odd):
    fmt, has_index = "fp32", (True, False)
    if odd == "format" and peers.rank == peers.size - 1: fmt = "bf16"
    if odd == "layer" and peers.rank == peers.size - 1: has_index = (True, True)
    peers.check_start(pool_facts(make_pool(1, 4, 2, has_index=has_index, fmt=fmt)))
    return True

@pytest.mark.parametrize("odd,said", [("format", "pool.buffer.0 is .*fp32.* on ranks 0 and 1, .*bf16"),
                                      ("layer", "pool.buffer.3 is index 1 .* 0 on ranks 0 and 1")])
def test_sides_with_other_buffers_are_refused_by_name(odd, said):
    with pytest.raises(ConfigError, match=said): run_ranks(meet, 3, odd, backend="local")
    assert run_ranks(meet, 3, "", backend="local") == [True] * 3

def pass_over(peers, num_pages, seed):
    "All peers but the last own a request, the last receives it"
    cp, P = peers.size - 1, 4
    num_tokens = max(num_pages * P - 1, 0)
    table = cp + np.random.default_rng(seed).permutation(2 * num_pages)[:num_pages]
    if peers.rank < cp:
        pool = scribble(make_pool(cp, P, 2 * num_pages + 2), peers.rank)
        send = send_plan(layout(cp, P), layout(1, P), table)[peers.rank]
        send_pages(peers, pool, send, cp, request=1, num_tokens=num_tokens, first_token=0,
                   total_pages=num_pages)
        return page_digests(pool, peers.rank, table, num_tokens)
    pool, alloc = receiver(local_pages=num_pages + 1)
    got = recv_pages(peers, pool, alloc, range(cp))
    return page_digests(pool, 0, got.pages, num_tokens)

@pytest.mark.parametrize("cp,num_pages", [*itertools.product((1, 2, 3, 8), (0, 1, 2, 17))])
def test_many_ranks(cp, num_pages):
    *sent, got = run_ranks(pass_over, cp + 1, num_pages, cp, backend="local", seed=num_pages)
    assert got == {p: h for d in sent for p, h in d.items()} and len(got) == num_pages

def test_real_processes():
    *sent, got = run_ranks(pass_over, 4, 7, 0)
    assert got == {p: h for d in sent for p, h in d.items()} and len(got) == 7
