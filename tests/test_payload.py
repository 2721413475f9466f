"""One list of buffers, one signature, one budget on a host that all ranks have looked at"""
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.host_pool import HostPool
from cpkv.launch import run_ranks
from cpkv.laws import BudgetError, CapacityError, ConfigError, InputError
from cpkv.layout import PageLayout
from cpkv.measure import GIB
from cpkv.payload import agreed_pages, budget_pages, check_memory, check_pool
from cpkv.pool import FORMATS, PayloadDims, Pool
from payloads import DIMS, SHAPES, make

def local(fn, ranks, *args, **kw):
    return run_ranks(fn, ranks, *args, backend="local", timeout=20, **kw)

def test_a_million_bytes_hold_eleven_pages_of_all_three_parts():   # sglang#30581
    n = budget_pages(1_000_000, 64, [1152, 132, 96])
    assert (n, n * 64 * 1380) == (11, 971_520)
    assert budget_pages(1_000_000, 64, [1152]) == 13               # the mistake, and what it costs
    assert 13 * 64 * (1152 + 96) > 1_000_000

@pytest.mark.parametrize("budget", [-1, 0, 1, 88_319, 88_320, 176_639])
def test_a_budget_for_no_page_names_what_it_needs(budget):
    with pytest.raises(BudgetError, match="needed_bytes=176640") as e:
        budget_pages(budget, 64, [1152, 132, 96])
    assert e.value.facts["host_bytes"] == budget and e.value.exit_code == 1
    assert budget_pages(176_640, 64, [1152, 132, 96]) == 2

@given(st.integers(1, 8), st.sampled_from(sorted(FORMATS)), st.sampled_from(SHAPES),
       st.integers(2, 40), st.integers(0, 99))
def test_no_budget_is_passed_and_no_room_for_a_page_is_left(P, fmt, shape, pages, more):
    payload = make(P=P, fmt=fmt, has_index=shape[0], draft=shape[1])
    one = payload.page_bytes()
    budget = pages * one + more % one
    host = HostPool(payload, 0, budget)
    assert host.storage.nbytes == pages * one == sum(b.pages.nbytes for b in host.buffers)
    assert budget - host.storage.nbytes < one

@given(st.integers(0, 50_000))
def test_a_draft_never_enlarges_the_pool(more):
    target = make(has_index=(True, True), draft=0)
    both = make(has_index=(True, True, True), draft=1)
    budget = 2 * both.page_bytes() + more
    a, b = (p.local_pages(budget) for p in (target, both))
    assert b <= a and b * both.page_bytes() <= budget
    target_part = b * (both.part_bytes()["target latent"] + both.part_bytes()["target index"])
    assert b * sum(both.part_bytes().values()) > target_part       # the draft is counted

def test_four_layers_and_the_draft_list_four_and_four():           # sglang#23539
    payload = make(has_index=(True,) * 4, draft=1)
    parts = [payload.part_of(b) for b in payload.blank()]
    assert parts == (["target latent"] * 3 + ["draft latent"] + ["target index"] * 3
                     + ["draft index"])
    lacks = Pool(payload.layout, has_index=(True,) * 3, dims=DIMS, format=FORMATS["fp32"],
                 local_pages=3)
    with pytest.raises(ConfigError, match="host and device"): check_pool(payload, lacks)

@pytest.mark.parametrize("change", [
    dict(draft=0), dict(P=8), dict(cp=4), dict(fmt="bf16"), dict(has_index=(True, True, True)),
    dict(has_index=(True, False, True, True)), dict(dims=replace(DIMS, rope=4))], ids=str)
def test_whatever_changes_bytes_changes_signature_and_stamp(change):
    a, b = make(), make(**change)
    assert a.signature() != b.signature() and a.stamp(0) != b.stamp(0) and a.stamp(0) != 0

def test_ranks_stamp_differently_and_equal_payloads_alike():
    assert make().signature() == make().signature()
    assert len({int(make().stamp(r)) for r in (0, 1)} | {int(make().stamp(0))}) == 2

@pytest.mark.parametrize("draft", [-1, 3, 4])
def test_a_payload_without_target_is_refused(draft):
    with pytest.raises(InputError): make(draft=draft)

def test_a_pool_of_another_payload_is_refused_with_both_lines():
    pool = Pool(PageLayout(cp_size=2, page_size=4), has_index=(True, False, True), dims=DIMS,
                format=FORMATS["bf16"], local_pages=3)
    with pytest.raises(ConfigError) as e: check_pool(make(), pool)
    assert e.value.facts == dict(host="format fp32", device="format bf16")

BIG = make(cp=8, P=64, has_index=(True,) * 64, draft=1, fmt="fp8_packed",
           dims=PayloadDims(latent=512, rope=64, index=128))

def ask(peers, left, gib):
    "Take memory as soon as it may be taken; what comes later finds less"
    try:
        pages = agreed_pages(peers.world(), BIG, gib * GIB, reserve_bytes=10 * GIB,
                             ranks_on_host=8, probe=lambda: left[0])
    except CapacityError as e: return e.facts
    left[0] -= gib * GIB
    return pages

@pytest.mark.parametrize("seed", range(4))
def test_eleven_gib_fit_in_any_order_and_twelve_on_no_rank(seed):  # sglang#38156
    pages = local(ask, 8, [100 * GIB], 11, seed=seed)
    assert pages == [BIG.local_pages(11 * GIB)] * 8
    for facts in local(ask, 8, [100 * GIB], 12, seed=seed):
        assert facts["free_bytes"] == 100 * GIB and facts["reserve_bytes"] == 10 * GIB
        assert facts["ranks_on_host"] == 8
        assert facts["request_bytes"] == BIG.local_pages(12 * GIB) * BIG.page_bytes()

def test_exact_numbers_of_the_rule():
    fits = dict(reserve_bytes=10 * GIB, ranks_on_host=8)
    check_memory(11 * GIB, 100 * GIB, **fits)
    check_memory(11 * GIB + GIB // 4, 100 * GIB, **fits)           # 8 x 11.25 = 90
    with pytest.raises(CapacityError): check_memory(11 * GIB + GIB // 4 + 1, 100 * GIB, **fits)
    with pytest.raises(CapacityError): check_memory(1, 5, reserve_bytes=5, ranks_on_host=1)
    with pytest.raises(InputError): check_memory(1, 5, reserve_bytes=0, ranks_on_host=0)

def one_host_is_full(peers):
    free = 10_000 if peers.rank == 2 else GIB
    try:
        agreed_pages(peers.world(), make(cp=4), 5000, reserve_bytes=0, ranks_on_host=4,
                     probe=lambda: free)
    except CapacityError as e: return e.message
    return "accepted"

def test_a_full_host_refuses_all_ranks():
    said = local(one_host_is_full, 4)
    assert "pools of all its ranks" in said[2] and "accepted" not in said
    assert {s for i, s in enumerate(said) if i != 2} == {"another rank's host has no memory"}

def unequal(peers, what):
    payload = make(draft=peers.rank) if what == "draft" else make()
    budget = 5000 + 1000 * peers.rank if what == "budget" else 5000
    agreed_pages(peers.world(), payload, budget, reserve_bytes=0, ranks_on_host=2,
                 probe=lambda: GIB)

@pytest.mark.parametrize("what,said", [
    ("budget", "config.host.bytes is 5000 on rank 0, 6000 on rank 1"),
    ("draft", "config.host.draft_layers is 0 on rank 0, 1 on rank 1")])
def test_ranks_that_differ_are_told_both_numbers(what, said):
    with pytest.raises(ConfigError, match=said): local(unequal, 2, what)
