"""A turn that is right differs in nothing, and each thing that is not right is named alone"""
import pytest
import torch

from cpkv.compare import compare_turn, differences, first_difference

def answers(R=2):
    "What everybody says of a turn of four tokens in two pages, one a rank"
    ranks = [dict(cached=0, cached_host=0, prompt=4, digests={r: f"p{r}"}, received=[8, 4], predicted=[8, 4],
                  output_bytes=3, predicted_output=3, logits=torch.zeros(3), sent=5) for r in range(R)]
    pages = {r: f"p{r}" for r in range(R)}
    decoded = dict(logits=[torch.ones(3)], output=[1, 2], digests=pages, payload=5 * R, pages=R)
    oracle = dict(logits=[torch.zeros(3), torch.ones(3)], output=[1, 2], prompt_digests=pages, digests=pages)
    return dict(prefill=ranks, decoded=decoded, oracle=oracle)

def test_what_is_right_differs_in_nothing():
    t = compare_turn(**answers())
    assert differences(t) == [] and t["first_kv_difference"] is None and t["pages_compared"] == 2

@pytest.mark.parametrize("who,change,named,where", [
    (0, dict(received=[8, 5]), "received bytes", None), (1, dict(output_bytes=4), "output bytes", None),
    (1, dict(sent=4), "handoff bytes", None), (0, dict(logits=torch.tensor([0, 0, float("nan")])), "logits", None),
    (1, dict(logits=torch.tensor([0, 1e-9, 0])), "logits", None),
    (1, dict(digests={1: "other"}), "KV bytes", dict(side="prefill", page=1, rank=1)),
    (0, dict(digests={}), "KV bytes", dict(side="prefill", page=0, rank=None)),
    (0, dict(digests={0: "p0", 2: "more"}), "KV bytes", dict(side="prefill", page=2, rank=0)),
    ("decoded", dict(output=[1, 3]), "tokens", None), ("decoded", dict(payload=9), "handoff bytes", None),
    ("decoded", dict(logits=[torch.zeros(3)]), "logits", None),
    ("decoded", dict(digests={0: "p0", 1: "x"}), "KV bytes", dict(side="decode", page=1, rank=None)),
    ("oracle", dict(output=[2, 2]), "tokens", None)], ids=str)
def test_one_thing_that_is_wrong_is_named_alone(who, change, named, where):
    said = answers()
    part = said[who] if isinstance(who, str) else said["prefill"][who]
    part |= change
    t = compare_turn(**said)
    assert differences(t) == [named] and t["first_kv_difference"] == where

def test_of_two_pages_the_first_is_named_and_the_prefill_side_before_the_other():
    said = answers()
    said["decoded"]["digests"] = {0: "x", 1: "y"}
    assert first_difference(**said) == dict(side="decode", page=0, rank=None)
    said["prefill"][1]["digests"] = {1: "z"}
    assert first_difference(**said) == dict(side="prefill", page=1, rank=1)

def test_answers_of_another_number_of_tokens_are_not_compared():
    said = answers()
    said["decoded"]["logits"] = []
    with pytest.raises(ValueError): compare_turn(**said)
