"""One object, one budget, one set of pages; what is not whole is refused by name"""
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpkv.alloc import Holder
from cpkv.copy_thread import probe_pools
from cpkv.handoff import pack_pages
from cpkv.host_pool import Claims, FORMS, HostPool, Use, hash_pages, pinned_bytes, plain_bytes
from cpkv.laws import (BudgetError, CapacityError, ConfigError, ConservationError, InputError,
                       LeaseError, OwnershipError, PageIdError, ResidencyError)
from cpkv.layout import PageLayout
from cpkv.payload import PARTS, Payload, check_pool
from cpkv.pool import FORMATS, PayloadDims, Pool
from payloads import DIMS, SHAPES, make

def host_of(payload: Payload, pages=9, rank=0, **kw) -> HostPool:
    return HostPool(payload, rank, pages * payload.page_bytes(), **kw)

def scribble(host: HostPool, seed=0) -> None:
    g = torch.Generator().manual_seed(seed)
    for b in host.buffers:
        b.pages.copy_(torch.randint(0, 256, tuple(b.pages.shape), generator=g, dtype=torch.uint8))

# -- buffers

@pytest.mark.parametrize("has_index,draft", SHAPES)
@pytest.mark.parametrize("fmt", sorted(FORMATS))
@pytest.mark.parametrize("form", sorted(FORMS))
def test_buffers_are_those_of_the_device_in_its_order(has_index, draft, fmt, form):
    payload = make(has_index=has_index, draft=draft, fmt=fmt)
    pool = Pool(payload.layout, has_index=has_index, dims=DIMS, format=FORMATS[fmt], local_pages=3)
    host = host_of(payload, form=form)
    facts = lambda bs: [(b.component, b.layer, b.fmt.name, b.page_size, b.page_bytes) for b in bs]
    assert facts(host.buffers) == facts(pool.buffers) and len(host.buffers) == 2 * len(has_index)
    assert [len(b.pages) for b in host.buffers] == \
        [9 if b.component == "latent" or has_index[b.layer] else 0 for b in host.buffers]
    assert host.page_bytes == pool.page_bytes() == sum(payload.part_bytes().values())
    assert tuple(payload.part_bytes()) == PARTS
    check_pool(payload, pool)

# -- forms

@pytest.mark.parametrize("has_index,draft", SHAPES)
def test_both_forms_hold_the_same_bytes_and_a_page_is_one_range(has_index, draft):
    payload = make(has_index=has_index, draft=draft, fmt="fp8")
    hosts = {form: host_of(payload, form=form) for form in FORMS}
    for h in hosts.values(): scribble(h)
    every = np.arange(9)
    a, b = hosts["layer_first"], hosts["page_first"]
    assert hash_pages(a.buffers, every) == hash_pages(b.buffers, every)
    for x, y in zip(a.buffers, b.buffers): assert torch.equal(x.pages, y.pages)
    for p in every:
        start, stop = b.byte_range(p)
        whole = torch.cat([x.pages[p] for x in a.buffers if len(x.pages)])
        assert torch.equal(b.storage[start:stop], whole)
    with pytest.raises(InputError): a.byte_range(1)

@pytest.mark.parametrize("form", sorted(FORMS))
def test_writing_a_page_touches_no_other(form):
    host = host_of(make(), form=form)
    for b in host.buffers:
        if len(b.pages): b.pages[4] = 7
    for b in host.buffers:
        others = [p for p in range(9) if p != 4]
        if len(b.pages): assert (b.pages[4] == 7).all() and (b.pages[others] == 0).all()
    assert int((host.storage == 7).sum()) == host.page_bytes

def test_an_index_page_keeps_values_then_scales():                 # vllm#50576, P=4 D=8
    payload = make(P=4, fmt="fp8", dims=replace(DIMS, index=8))
    host = host_of(payload, form="page_first")
    index = next(b for b in host.buffers if b.component == "index")
    assert [int(index.first_byte(i, 0)) for i in range(4)] == [0, 8, 16, 24]
    assert [int(index.first_byte(i, 1)) for i in range(4)] == [32, 36, 40, 44]
    assert index.page_bytes == 48

def test_addresses_are_64_bits_wide(tmp_path):                     # tokenspeed#501
    payload = make(cp=1, P=64, has_index=(False, True), draft=1, fmt="fp8_packed",
                   dims=PayloadDims(latent=512, rope=64, index=128))
    one, n = payload.page_bytes(), 50_000
    assert one * n > 1 << 32
    def sparse(size):
        path = str(tmp_path / "pages")
        with open(path, "wb") as f: f.truncate(size)
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8), lambda: None
    host = HostPool(payload, 0, one * n, form="page_first", new_bytes=sparse)
    far, near = n - 1, (1 << 32) // one
    for p in (far, near):
        for i, b in enumerate(host.buffers):
            if len(b.pages): b.pages[p] = i + 1
        start, stop = host.byte_range(p)
        assert start == p * one and int(host.storage[start]) == 1
        assert int(host.storage[stop - 1]) == len(host.buffers)
        assert int(host.storage[start - 1]) == 0
    assert all(int(b.pages[near - 1].sum()) == 0 for b in host.buffers if len(b.pages))
    host.close()


# -- memory

def test_a_machine_without_room_is_a_refusal():
    with pytest.raises(CapacityError): plain_bytes(1 << 60)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError): pinned_bytes(64)

def test_a_pool_that_cannot_be_built_takes_no_memory():
    taken = []
    def count(n):
        taken.append(n)
        return plain_bytes(n)
    for wrong in (dict(form="token_first"), dict(rank=2), dict(rank=-1)):
        with pytest.raises((InputError, OwnershipError)): host_of(make(), new_bytes=count, **wrong)
    with pytest.raises(BudgetError): host_of(make(), 1, new_bytes=count)
    assert taken == []
    back = []
    host = host_of(make(), new_bytes=lambda n: (plain_bytes(n)[0], lambda: back.append(n)))
    host.close()
    host.close()
    assert back == [9 * make().page_bytes()]                       # given back once


# -- the pages

@given(st.integers(1, 4), st.data())
def test_a_copy_keeps_the_owner(cp, data):
    host = host_of(make(cp=cp), pages=12)
    device = np.array(data.draw(st.lists(st.integers(cp, 9 * cp), unique=True, max_size=11)), int)
    owners = host.layout.owner_of_page(device)
    if (np.bincount(owners, minlength=cp) > 11).any(): return
    pages = host.take(device)
    assert (host.layout.owner_of_page(pages.astype(int)) == owners).all()
    assert sum(host.alloc.count(Holder.TRANSFER)) == len(device)
    host.alloc.check()
    host.drop(pages, Holder.TRANSFER)
    assert host.alloc.free_by_class == [11] * cp and host.used_bytes() == 0

def test_one_short_class_takes_nothing():                          # trap 51
    host = host_of(make(cp=2), pages=3)                            # two pages a class
    with pytest.raises(CapacityError): host.take(np.array([2, 4, 6, 3]))
    assert host.alloc.free_by_class == [2, 2]

def test_the_stripes_of_all_ranks_are_the_pages_once():
    pages = np.array([5, 9, 3, 4, 8, 7])
    mine = [host_of(make(cp=3), rank=r).mine(pages) for r in range(3)]
    lay = PageLayout(cp_size=3, page_size=4)
    assert sorted(int(lay.page_of(r, p)) for r in range(3) for p in mine[r]) == sorted(pages)

def stored(host: HostPool, n=4):
    pages = host.take(np.arange(2, 2 + n))
    host.mark_written(pages, hash_pages(host.buffers, host.mine(pages)))
    host.keep(pages)
    return pages

def test_only_what_was_written_is_kept_and_what_is_dropped_is_forgotten():
    host = host_of(make())
    pages = host.take(np.array([2, 3, 4]))
    with pytest.raises(ResidencyError, match="never written.*node=4"): host.keep(pages, node=4)
    assert sum(host.alloc.count(Holder.TREE)) == 0
    host.mark_written(pages)
    host.keep(pages)
    host.drop(pages)
    again = host.take(np.array([2, 3, 4]))
    assert again.tolist() == pages.tolist()
    with pytest.raises(ResidencyError): host.check_written(again)

def test_a_rank_without_pages_of_a_node_keeps_it_too():
    host = host_of(make(), rank=1)
    pages = host.take(np.array([2, 4]))                            # all of rank 0
    host.mark_written(pages)
    host.keep(pages)
    host.verify(pages)
    assert sum(host.alloc.count(Holder.TREE)) == 2 and host.used_bytes() == 0

def test_bytes_of_a_payload_without_a_draft_are_refused():
    host, other = host_of(make(draft=1)), make(draft=0)
    pages = stored(host)
    host._written[host.mine(pages)[0]] = other.stamp(0)
    with pytest.raises(ResidencyError, match="another payload.*rank=0.*node=3"):
        host.check_written(pages, node=3)

@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_changed_bit_in_any_part_is_found(form):
    host = host_of(make(), form=form)
    scribble(host)
    pages = stored(host)
    host.verify(pages)
    for b, local_page in itertools.product(host.buffers, host.mine(pages)):
        if not len(b.pages): continue
        b.pages[local_page, -1] ^= 1
        with pytest.raises(ResidencyError, match="not what was written") as e:
            host.verify(pages, node=8, request=5)
        assert e.value.facts == dict(rank=0, node=8, request=5, local_page=int(local_page))
        b.pages[local_page, -1] ^= 1
    host.verify(pages)

def test_swapped_pages_are_found_and_a_missing_digest_is_said():
    host = host_of(make())
    scribble(host)
    pages = stored(host)
    for b in host.buffers:
        if len(b.pages): b.pages[[1, 2]] = b.pages[[2, 1]]
    with pytest.raises(ResidencyError): host.verify(pages)
    plain = host.take(np.array([2]))
    host.mark_written(plain)
    with pytest.raises(ResidencyError, match="no digest"): host.verify(plain)

def test_a_digest_is_that_of_the_device_page():
    device, host = probe_pools()
    for a, b in zip(device.buffers, host.buffers): b.pages.copy_(a.pages)
    every = np.arange(9)
    assert hash_pages(device.buffers, every) == hash_pages(host.buffers, every)
    assert torch.equal(pack_pages(device, every), pack_pages(host, every))
    assert hash_pages(host.buffers, np.array([], int)) == []

def test_reset_is_all_parts_or_a_refusal():
    host = host_of(make())
    pages = stored(host)
    host.take(np.array([2]))
    host.claims.begin(np.asarray(pages, int), Use.READ)
    with pytest.raises(LeaseError, match="busy"): host.reset()
    assert sum(host.alloc.count(Holder.TREE)) == 4
    host.claims.end(np.asarray(pages, int), Use.READ)
    host.reset()
    assert host.alloc.free_by_class == [8, 8] and host.used_bytes() == 0
    with pytest.raises(ConservationError): host.drop(pages)
    assert not host._written.any() and not host._digests

def test_pages_that_cannot_be_are_refused_before_any_effect():
    host = host_of(make())
    pages = stored(host)
    for bad in ([0], [1], [-1], [99], [int(pages[0]), 1]):
        with pytest.raises(PageIdError): host.drop(np.array(bad))
    with pytest.raises(ConservationError): host.drop(np.array([pages[0], pages[0]]))
    with pytest.raises(ConservationError): host.keep(pages)
    host.check_written(pages)
    assert sum(host.alloc.count(Holder.TREE)) == 4


# -- claims

@given(st.lists(st.tuples(st.sampled_from(Use), st.integers(0, 5)), max_size=30))
def test_readers_share_and_a_writer_is_alone(uses):
    claims, held = Claims(6), []
    for use, page in uses:
        others = [u for u, p in held if p == page]
        free = Use.WRITE not in others and (use is Use.READ or not others)
        if free:
            claims.begin(np.array([page]), use)
            held.append((use, page))
        else:
            with pytest.raises(LeaseError): claims.begin(np.array([page]), use)
        assert len(claims) == len(held)
    for use, page in held: claims.end(np.array([page]), use)
    assert len(claims) == 0
    with pytest.raises(LeaseError): claims.end(np.array([0]), Use.READ)


def test_it_draws_itself():
    host = host_of(make())
    host.take(np.array([2]))
    stored(host, 2)
    html = host._repr_html_()
    assert "tree" in html and "copy" in html and "draft index" in html and "roof" in html
    assert html == host._repr_html_() and "9 pages of 512 bytes" in repr(host)

@pytest.mark.cuda
def test_pinned_memory_has_the_size_that_was_asked_for():
    x, give_back = pinned_bytes(1_000_003)
    assert x.is_pinned() and x.nbytes == 1_000_003 and int(x.sum()) == 0
    give_back()
    assert not x.is_pinned()
