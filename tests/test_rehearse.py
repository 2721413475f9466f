"""A rung without weights sees what one with weights would, and sizes that no plan can have are refused"""
from dataclasses import replace

import pytest

from cpkv.laws import InputError
from cpkv.rehearse import BASELINES, MOST_CHUNKS, MOST_RANKS, RUNGS, calls_of, find_case, rehearse

def case_of(cp=4, history=200, chunk=70, model="glm-5", **more):
    return find_case(model, history, chunk, draft=False, cp=cp, format="fp8_packed", **more)

@pytest.mark.parametrize("rung", (BASELINES[0], *RUNGS), ids=lambda r: r.name)  # two layers are dealt otherwise
@pytest.mark.parametrize("cp,history,chunk", [(1, 0, 1), (2, 0, 64), (3, 63, 65), (4, 200, 70), (8, 1000, 512)])
def test_layers_that_are_gone_through_receive_what_was_planned(rung, cp, history, chunk):
    "A layer with an indexer and one that has none, on the last rank"
    *_, last = rehearse(case_of(cp, history, chunk), rung)
    for layer, got in last["received"].items():
        if layer >= 0: assert got == last["predicted"][layer]
    assert last["remaps"] == 1 and (cp == 1) == (not any(last["received"].values()))

def test_a_rung_of_page_cuts_needs_more_scratch_than_one_of_token_cuts():
    by_tokens, by_pages = (rehearse(case_of(8, 1000, 4096), r)[0]["scratch"] for r in RUNGS[2:4])
    assert by_pages > by_tokens

def test_the_first_and_the_last_rank_are_told_and_one_rank_once():
    assert [len(rehearse(case_of(cp), RUNGS[0])) for cp in (1, 2, 5)] == [1, 2, 2]

@pytest.mark.parametrize("change", [dict(cp=0), dict(cp=MOST_RANKS + 1), dict(chunk=0), dict(history=-1),
                                    dict(history=MOST_CHUNKS + 1, chunk=1), dict(history=1 << 24)], ids=str)
def test_sizes_without_a_plan_are_refused(change):
    with pytest.raises(InputError): replace(case_of(), **change)

def test_a_model_with_weights_has_smaller_sizes_where_none_were_given():
    sizes = [(c.history, c.chunk) for c in (find_case(m, None, None, draft=False, cp=2, format="bf16")
                                            for m in ("tiny", "glm-5"))]
    assert sizes == [(2048, 1024), (131072, 8192)]

def test_calls_are_counted_by_name():
    def one(): pass
    def two(): one(), one()
    with calls_of("one") as seen: two(), one()
    one()
    assert seen == {"one": 3}
