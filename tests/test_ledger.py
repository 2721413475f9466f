"""A ledger's text holds all that must agree, and its sums do not depend on where it is cut"""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.ledger import LANES, Entry, Ledger

entries = st.builds(Entry, lane=st.sampled_from(LANES),
                    op=st.sampled_from(["all_gather", "barrier"]),
                    tag=st.sampled_from(["", "a", "layer=3"]),
                    layer=st.integers(-1, 2),
                    shape=st.sampled_from([(), (0,), (2,), (2, 3), (23,)]),
                    dtype=st.sampled_from(["", "uint8"]), digest=st.integers(0, 2),
                    received_bytes=st.integers(0, 9), seq=st.integers(0, 2),
                    src=st.integers(-1, 2))

@given(entries, entries)
def test_text_of_an_entry_holds_all_that_must_agree(a, b):
    assert (str(a) == str(b)) == (a._replace(received_bytes=0) == b._replace(received_bytes=0))

@given(st.lists(entries, max_size=40), st.integers(1, 5))
def test_sums_do_not_depend_on_the_cut(es, keep):
    whole, cut = Ledger(), Ledger(keep=keep)
    marks = []
    for e in es:
        whole.add(e)
        marks.append(cut.mark())
        cut.add(e)
        assert keep <= len(cut.entries) < 2 * keep or len(cut.entries) == cut.mark()
    for i, mark in enumerate(marks):
        assert mark == i
        if mark < cut.forgotten:
            with pytest.raises(ValueError, match="forgotten"): cut.since(mark)
        else: assert cut.since(mark).entries == es[i:]
    total = sum(e.received_bytes for e in es if e.lane != "control")
    for by in ("layer", "tag", "op", "lane"): assert sum(whole.received(by).values()) == total
    assert whole.received(lanes=["control"], tags=["a"]) == {
        k: sum(e.received_bytes for e in es if (e.lane, e.tag, e.layer) == ("control", "a", k))
        for k in {e.layer for e in es if (e.lane, e.tag) == ("control", "a")}}

def test_ledger_draws_itself_the_same_every_time():
    es = [Entry("main", "all_gather", "latent", i, (2,), "uint8", 0, 2, i) for i in range(20)]
    assert Ledger(es)._repr_html_() == Ledger(es)._repr_html_()
    assert "8 more" in Ledger(es)._repr_html_()
    assert "<svg" in Ledger()._repr_html_()
