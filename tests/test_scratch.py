"""Leases never overlap, add up to the arena, and end once"""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.laws import CapacityError, LeaseError
from cpkv.scratch import ALIGN, Scratch

@given(st.lists(st.one_of(st.lists(st.integers(0, 900), max_size=4), st.integers(0, 5)), max_size=25))
def test_leases_never_overlap_and_add_up(moves):
    "A list of sizes is a lease, a number ends one"
    s, held = Scratch(4000), []
    for move in moves:
        before = list(s.leased)
        if isinstance(move, int):
            if held: held.pop(move % len(held))[0].end()
            continue
        need = sum(-(-n // ALIGN) * ALIGN for n in move)
        gaps = np.diff([0, *(x for span in s.leased for x in span), 4000])[::2]
        try: lease = s.take(move)
        except CapacityError as e:
            assert need > max(gaps) and s.leased == before and e.facts["need"] == need
            continue
        assert need <= max(gaps) and [len(p) for p in lease.parts] == move
        held.append((lease, list(lease.parts)))
        parts = [p for _, ps in held for p in ps if len(p)]
        for p in parts: assert p.storage_offset() % ALIGN == 0 and p.untyped_storage().nbytes() == 4000
        spans = sorted((p.storage_offset(), p.storage_offset() + len(p)) for p in parts)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
        assert s.free_bytes == 4000 - sum(b - a for a, b in s.leased)
    for lease, _ in held: lease.end()
    assert s.free_bytes == 4000 and s.leased == []

def test_a_lease_ends_once():
    s = Scratch(1000)
    lease = s.take([300, 0, 1])
    assert s.free_bytes == 1000 - 768
    lease.end()
    with pytest.raises(LeaseError, match="twice"): lease.end()
    assert s.free_bytes == 1000 and s.take([]).parts == []
