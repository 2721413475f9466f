"Each new token is computed once, by one rank, and the work is even"
import numpy as np
import pytest
from hypothesis import given

from batches import GOLD, extends_of, golden, lengths, new_tokens, pairs_of, positions, ranks, splits
from cpkv.laws import InputError
from cpkv.split import Extend, draw_split, interleave_split, token_cuts, zigzag_split

@splits
@given(lengths, ranks)
def test_segments_tile_every_request(split, pairs, R):
    ext = extends_of(pairs)
    made = split(ext, R)
    got = [(s.index, p) for s in made.segments for p in positions(s)]
    assert len(got) == len(set(got)) and sorted(got) == new_tokens(ext)
    assert [len(positions(s)) for s in made.segments] == made.size.ravel().tolist()
    assert sum(made.rows_by_rank) == len(got) and made.max_rows == max(made.rows_by_rank)
    assert [s for r in range(R) for s in made.of_rank(r)] == list(made.segments)
    assert all(s.rank == r for r in range(R) for s in made.of_rank(r))

@given(lengths, ranks)
def test_zigzag_segments_differ_by_one_at_most(pairs, R):
    for i, e in enumerate(extends_of(pairs)):
        mine = [s for s in zigzag_split(extends_of(pairs), R).segments if s.index == i]
        sizes = [len(positions(s)) for s in sorted(mine, key=lambda s: (s.start, s.stop))]
        assert sizes == np.diff(token_cuts(e.num_tokens, 2 * R)).tolist()
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)

@given(lengths, ranks)
def test_interleave_deals_the_tokens_of_the_batch_round(pairs, R):
    ext = extends_of(pairs)
    split, whole = interleave_split(ext, R), new_tokens(ext)
    for r in range(R):
        assert [(s.index, p) for s in split.of_rank(r) for p in positions(s)] == whole[r::R]
    assert max(split.rows_by_rank) - min(split.rows_by_rank) <= 1

@given(lengths, ranks)
def test_a_rank_holds_heads_then_tails_in_batch_order(pairs, R):
    split, B = zigzag_split(extends_of(pairs), R), len(pairs)
    for r in range(R):
        mine = split.of_rank(r)
        assert [s.index for s in mine] == [*range(B)] * 2
        for head, tail in zip(mine[:B], mine[B:]): assert head.stop <= tail.start

@splits
@pytest.mark.parametrize("R", range(1, 9))
def test_every_total_is_covered_or_refused(split, R):
    with pytest.raises(InputError, match="at least one token"): Extend(request=0, start=3, stop=3)
    for n in range(1, 4 * R + 2):
        made = split(extends_of([(3, n)]), R)
        assert sorted(p for s in made.segments for p in positions(s)) == [*range(3, 3 + n)]
        assert made.max_rows == -(-n // R)

def test_the_work_is_even():
    for R in (2, 3, 8):
        for n in (2 * R * 16, 2 * R * 16 + 1, 1000):
            s = zigzag_split(extends_of([(0, n)]), R)
            pairs = [sum(p + 1 for x in s.of_rank(r) for p in range(x.start, x.stop)) for r in range(R)]
            assert max(pairs) - min(pairs) <= (2 * n if n % (2 * R) else 0)  # two last rows' worth

# -- another engine's numbers

def field_of(extends, split, rank):
    "What that engine calls each number, from a split of ours"
    S, B, mine = 2 * split.ranks, len(extends), split.of_rank(rank)
    natural = sorted(split.segments, key=lambda s: (s.index, s.start))
    size = lambda s: s.stop - s.start
    return dict(
        split_list=[size(s) for s in natural], zigzag_index=[natural.index(s) for s in mine],
        cp_reverse_index=[split.segments.index(s) for s in natural],
        reverse_split_len=[size(s) for s in split.segments], per_rank=list(split.rows_by_rank),
        max_rank_len=[split.max_rows] * split.ranks,
        kv_prev=[s.stop for s in mine[:B]], kv_next=[s.stop for s in mine[B:]],
        q_prev=[size(s) for s in mine[:B]], q_next=[size(s) for s in mine[B:]]), S

@golden
def test_golden_zigzag(case):
    pairs = pairs_of(case)
    assert min(n for _, n in pairs) >= 2 * case["cp"]                # no segment is empty
    split = zigzag_split(extends_of(pairs), case["cp"])
    fields, _ = field_of(split.extends, split, case["rank"])
    assert fields == {k: case[k] for k in fields}
    assert set(case) == set(fields) | {"cp", "rank", "seq_lens", "extend_lens"}

def test_all_golden_cases_are_there(): assert len(GOLD) == 168

def test_worked_example_one_request():
    "3,670 new tokens after 1 on four ranks, seen from rank 1"
    ext = extends_of([(1, 3670)])
    got, _ = field_of(ext, zigzag_split(ext, 4), 1)
    assert got["split_list"] == [459] * 6 + [458] * 2 and got["zigzag_index"] == [1, 6]
    assert got["cp_reverse_index"] == [0, 2, 4, 6, 7, 5, 3, 1]
    assert got["per_rank"] == [917, 917, 918, 918]
    assert (got["kv_prev"], got["kv_next"]) == ([919], [3213])

def test_worked_example_two_requests():
    ext = extends_of([(0, 12), (0, 9)])
    got, _ = field_of(ext, zigzag_split(ext, 4), 1)
    assert got["split_list"] == [2, 2, 2, 2, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1]
    assert got["zigzag_index"] == [1, 9, 6, 14]
    assert got["cp_reverse_index"] == [0, 4, 8, 12, 14, 10, 6, 2, 1, 5, 9, 13, 15, 11, 7, 3]


# -- small things

def test_cuts_differ_by_one_longer_ones_first():
    assert token_cuts(0, 3) == [0, 0, 0, 0] and token_cuts(7, 3) == [0, 3, 5, 7]

def test_a_rank_that_holds_nothing_is_not_drawn():
    assert "rank 3" not in draw_split(zigzag_split(extends_of([(2, 3)]), 4)).html
