"""Lengths in order, chunks that end on pages, and sizes that make sense"""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkv.laws import ConservationError, InputError
from cpkv.request import EngineConfig, Request, next_stop

PROMPT = np.arange(20)

@given(n=st.integers(1, 60), chunk=st.integers(1, 70), P=st.sampled_from([1, 4, 16]), start=st.integers(0, 59))
@settings(max_examples=200)
def test_chunks_end_on_pages_and_reach_the_end(n, chunk, P, start):
    at, seen = min(start, n - 1), []
    while at < n:
        stop = next_stop(at, n, chunk, P)
        assert at < stop <= min(n, at + chunk)
        assert stop == n or stop % P == 0 or chunk < P
        seen.append(stop)
        at = stop
    assert seen[-1] == n

def test_lengths_out_of_order_are_found():
    r = Request(3, PROMPT, cached=8, computed=4)
    with pytest.raises(ConservationError, match="out of order"): r.check()

@pytest.mark.parametrize("error,match,change", [
    (InputError, "page_size", dict(page_size=0)), (InputError, "chunk", dict(chunk=0)),
    (InputError, "reader", dict(reader="telepathy")), (InputError, "split", dict(split="thirds")),
    (InputError, "format", dict(format="int3")), (InputError, "device_tokens", dict(device_tokens=-1))])
def test_config_refuses(error, match, change):
    with pytest.raises(error, match=match): EngineConfig(**change)
