"""Each guard of the host tier: without it the search finds a broken law, with it nothing changed"""
import pytest

from cpkv.explore import explore
from cpkv.guards import GUARDS, PLAIN, draw_hunt, hunt, removed

QUICK = [g for g in GUARDS if g.bounds == PLAIN]


@pytest.mark.parametrize("guard", QUICK, ids=lambda g: g.what)
def test_without_a_guard_a_law_breaks(guard):
    r = hunt(guard)
    assert r.error is not None and (r.story[-1] == ("start",) or len(r.story) == r.depth)

@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS, ids=lambda g: g.what)
def test_without_any_guard_a_law_breaks_and_with_it_the_same_world_is_sound(guard):
    assert hunt(guard).error is not None
    r = explore(guard.bounds)
    assert (r.error, r.stuck) == (None, 0)

def test_a_guard_comes_back(monkeypatch):
    for g in GUARDS:
        real, own = getattr(g.owner, g.name), g.name in vars(g.owner)
        with pytest.raises(KeyError), removed(g):
            assert getattr(g.owner, g.name) is not real
            raise KeyError
        assert getattr(g.owner, g.name) is real and (g.name in vars(g.owner)) == own

def test_every_rule_is_said_once_and_there_are_enough():
    assert len({g.what for g in GUARDS}) == len(GUARDS) >= 20
    assert {1, 2, 3, 5} <= {g.law for g in GUARDS}

def test_a_guard_that_is_not_found_is_shown_as_such():
    blind = QUICK[0]._replace(without=lambda f: f)
    r = hunt(blind)
    assert r.error is None
    assert "not found" in draw_hunt([blind], [r]).text and "0 of 1 found" in draw_hunt([blind], [r]).text
