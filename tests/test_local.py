"""Laws of ranks as threads: one runs, every schedule gives the same, a deadlock is a sentence"""
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rank_functions as rf
from cpkv.laws import ConfigError, CpkvError, InputError, OrderError, RankDied, WaitTimeout
from cpkv.local import run_local

def gone() -> bool:
    "No rank is left; other threads of this process are not ours to count"
    return not [t for t in threading.enumerate() if t.name.startswith("cpkv rank")]

@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_healthy_world(seed):
    ranks = run_local_seeded(rf.work, 3, seed)
    assert [r["wrong"] for r in ranks] == [[]] * 3
    assert all(r["lines"] == ranks[0]["lines"] for r in ranks)
    assert all(r["received"] == rf.predicted(3) for r in ranks)
    assert all((r["threads"], r["backend"], r["control"]) == (1, "local", 0) for r in ranks)

@pytest.mark.parametrize("R,seed", [(2, 0), (3, 1), (5, 0)])
def test_a_broadcast_fills_what_was_poisoned(R, seed):
    ranks = run_local_seeded(rf.spread, R, seed)
    assert [r["wrong"] for r in ranks] == [[]] * R
    assert all(r["lines"] == ranks[0]["lines"] for r in ranks)
    assert [(r["received"], r["prefetch"]) for r in ranks] == [rf.spread_bytes(r, R) for r in range(R)]

def run_local_seeded(fn, size, seed, *args):
    return run_local(fn, size, *args, seed=seed, timeout=20)

acts = st.sampled_from(["main", "prefetch", "spread", "agree", "wait"])
steps = st.lists(st.tuples(acts, st.integers(0, 3)), max_size=12)

def play(peers, program, log=None):
    "A random program: what a rank issues and when it waits"
    world, flying, seen = peers.world(), [], []
    for what, n in program:
        if log is not None: log.append(peers.rank)
        if what == "agree": seen.append(world.agreed_max([n * world.rank, -n]))
        elif what == "spread":
            x, out = torch.full((n,), world.rank), torch.full((n,), -1)
            flying.append(world.broadcast(x, src=n % world.size, layer=n, out=out))
        elif what == "wait" and flying: seen.append(flying.pop(n % len(flying)).wait().tolist())
        elif what != "wait":
            flying.append(world.all_gather(torch.full((n,), world.rank), lane=what, layer=n))
    return seen + [h.wait().tolist() for h in flying], world.ledger.entries

@given(steps, st.integers(2, 5), st.integers(1, 1000))
def test_results_and_ledgers_do_not_depend_on_the_schedule(program, R, seed):
    a, b = run_local(play, R, program), run_local_seeded(play, R, seed, program)
    assert a == b and all(seen == a[0][0] for seen, _ in a)
    for rank, (_, entries) in enumerate(a):
        assert list(map(str, entries)) == list(map(str, a[0][1]))
        for e in entries:
            parts = {"all_gather": R - 1, "broadcast": rank != e.layer % R}.get(e.op, 0)
            assert e.received_bytes == parts * 8 * e.layer

def test_seeds_explore_schedules_and_repeat():
    program = [("main", 1), ("agree", 1), ("wait", 0)] * 4
    def schedule(seed):
        log = []
        run_local_seeded(play, 4, seed, program, log)
        return tuple(log)
    seen = [schedule(s) for s in range(12)]
    assert len(set(seen)) > 6 and seen == [schedule(s) for s in range(12)]

@pytest.mark.parametrize("kind", [k for k in rf.ODD if k not in ("lane", "op")])
def test_another_collective_is_named_with_both_entries(kind):
    with pytest.raises(OrderError, match="rank 0 issued main#0 .*, but rank 2 issued main#0 ") as e:
        run_local(lambda p: rf.issue(p.world(), rf.ODD[kind] if p.rank == 2 else {}), 3)
    a, b = str(e.value).split(", but ")
    assert a.split("#0")[1] != b.split(" [ranks")[0].split("#0")[1] and gone()

@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["lane", "op"])
def test_a_deadlock_names_what_each_rank_waits_for(kind, seed):
    def fn(peers): return rf.issue(peers.world(), rf.ODD[kind] if peers.rank == 1 else {})
    with pytest.raises(OrderError, match="no rank can go on") as e: run_local_seeded(fn, 3, seed)
    odd = {"lane": "prefetch#0 all_gather", "op": "control#0 agreed_min"}[kind]
    assert f"rank 1 waits for {odd}" in str(e.value) and "of ranks 0, 2" in str(e.value)
    for r in (0, 2):
        assert f"rank {r} waits for main#0 all_gather(tag='latent', layer=3" in str(e.value)
    assert gone()

@pytest.mark.parametrize("kind", rf.SOURCES)
def test_another_broadcast_is_named_with_both_entries(kind):
    with pytest.raises(OrderError, match="rank 0 issued main#0 broadcast.*src=2.*, but rank 1 issued ") as e:
        run_local(lambda p: rf.differ_in_source(p, (kind,)) and p.barrier(), 3)
    a, b = str(e.value).split(" [ranks")[0].split(", but ")
    assert a.removeprefix("rank 0 ") != b.removeprefix("rank 1 ") and gone()

def test_a_source_that_never_sends_is_a_sentence():
    def late(peers):
        world = peers.world()
        if world.rank != 1: world.broadcast(torch.zeros(2), src=1, tag="view").wait()
    with pytest.raises(OrderError, match="rank 0 waits for main#0 broadcast.*src=1.*of rank 1; rank 1 has ended"):
        run_local(late, 3)

def test_two_batches_swapped_on_one_rank_are_caught():
    with pytest.raises(OrderError, match="digest=0xb.*digest=0x16"):
        run_local(rf.swapped_batches, 2)

def test_every_rank_hears_of_a_deadlock():
    heard = []
    def fn(peers):
        try: rf.issue(peers.world(), rf.ODD["lane"] if peers.rank else {})
        except OrderError as e: heard.append(str(e))
        with pytest.raises(OrderError): peers.barrier()    # a broken run stays broken
        return peers.rank
    assert run_local(fn, 3) == [0, 1, 2] and len(set(heard)) == 1 and len(heard) == 3

def test_a_rank_that_has_left_is_named():
    with pytest.raises(OrderError, match="rank 1 has ended"): run_local(rf.fail, 3, "leave")
    assert gone()

def test_a_loop_whose_length_depends_on_the_rank_is_an_error_not_a_hang():
    def admit(peers):
        free = [3, 5][peers.rank]
        for _ in range(5):
            if free == 0: break
            free -= 1
            peers.agreed_min([free])
        return peers.agreed_max([free])
    with pytest.raises(OrderError, match="agreed_m(in|ax).*agreed_m(in|ax)"): run_local(admit, 2)

@pytest.mark.parametrize("how,error,text", [
    ("raise", CpkvError, "trouble"), ("key", KeyError, "x"),
    ("unpicklable", rf.TwoArguments, "1/2"), ("exit", RankDied, "SystemExit")])
@pytest.mark.parametrize("seed", [0, 3])
def test_the_first_error_ends_all_and_is_raised(how, error, text, seed):
    with pytest.raises(error, match=text) as e: run_local_seeded(rf.fail, 4, seed, how, 2)
    assert e.value.rank == 2 and "rank 2 of 4" in e.value.__notes__[0] and gone()

def test_nobody_goes_on_after_an_error():
    went_on = []
    def fn(peers):
        peers.barrier()     # rank 1 comes last, so it goes on first, and fails
        if peers.rank == 1: raise KeyError("x")
        went_on.append(peers.rank)
    with pytest.raises(KeyError): run_local(fn, 2)
    assert went_on == []

def test_a_rank_that_keeps_the_baton_is_named():
    start = time.monotonic()
    with pytest.raises(WaitTimeout, match="rank 1 kept the others waiting"):
        run_local(rf.fail, 3, "spin", timeout=.3)
    while not gone() and time.monotonic() - start < 5: time.sleep(.01)
    assert gone() and time.monotonic() - start < 5

def test_a_run_is_bounded_though_the_baton_moves():
    def chatter(peers):
        while True: peers.barrier()
    with pytest.raises(WaitTimeout, match=r"more than 0\.3 s"):
        run_local(chatter, 2, timeout=30, limit=.3)

def test_letters_that_do_not_fit_are_refused():
    def misfit(peers):
        if peers.rank: peers.send(torch.zeros(2, 3), 0)
        else: peers.recv(torch.zeros(3, 2), 1)
    with pytest.raises(OrderError, match=r"1 sent .* \[2, 3\], but rank 0 receives .*\[3, 2\]"):
        run_local(misfit, 2)

def test_two_ranks_that_both_send_first_are_a_deadlock():
    def both(peers):
        peers.send(torch.zeros(1), 1 - peers.rank)
        peers.recv(torch.zeros(1), 1 - peers.rank)
    with pytest.raises(OrderError, match="rank 0 waits for rank 1 to receive"): run_local(both, 2)
    with pytest.raises(OrderError, match="rank 0 waits for rank 1 to send.*rank 1 has ended"):
        run_local(lambda p: p.recv(torch.zeros(1), 1) if p.rank == 0 else None, 2)

@pytest.mark.parametrize("n", [0, 3, -1])
def test_a_world_of_no_size_is_refused(n):
    with pytest.raises(ConfigError, match="one to all peers"): run_local(lambda p: p.world(n), 2)

def test_peers_that_want_different_worlds_are_refused():
    with pytest.raises(OrderError, match="num_ranks of the world is 2 on rank 0, 1 on rank 1"):
        run_local(lambda p: p.world(2 - p.rank), 2)

def test_a_letter_to_nobody_is_refused():
    for dst in (2, -1):
        with pytest.raises(ConfigError, match="another peer"):
            run_local(lambda p, dst=dst: p.send(torch.zeros(1), dst), 2)

def test_environment_is_each_ranks_own():
    env = [{"CPKV_DEBUG": "1"}, {}]
    assert run_local(lambda p: p.world().debug, 2, env=env) == [True, False]
    with pytest.raises(ConfigError, match="debug is on on rank 0, off on rank 1; env.CPKV_DEBUG"):
        run_local(rf.start, 2, [{}, {}], env=env)

def test_a_difference_in_configuration_is_refused():
    with pytest.raises(ConfigError, match=r"config\.chunk is 8 on ranks 0 and 2, 16 on rank 1"):
        run_local(rf.start, 3, [{"chunk": 8}, {"chunk": 16}, {"chunk": 8}])

def test_threads_of_the_caller_are_as_before():
    torch.set_num_threads(2)
    assert run_local(lambda p: torch.get_num_threads(), 3) == [1, 1, 1]
    fresh = []
    reader = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    reader.start(), reader.join()
    assert torch.get_num_threads() == 2 and fresh == [2]

def test_what_is_sent_is_what_it_was_when_sent():
    def reuse(peers):
        x = torch.full((3,), peers.rank)
        h = peers.world().all_gather(x)
        x.fill_(99)
        return h.wait()[:, 0].tolist()
    assert run_local(reuse, 3) == [[0, 1, 2]] * 3
    def spread(peers):
        x = torch.full((3,), peers.rank)
        h = peers.world().broadcast(x, src=1)
        x.fill_(99)
        return h.wait().tolist()
    assert run_local(spread, 3) == [[1, 1, 1]] * 3

def test_one_rank_is_solo_and_many_ranks_fit():
    assert run_local(lambda p: p.world().backend, 1) == ["solo"]
    assert run_local(lambda p: p.agreed_max([p.rank]), 64) == [[63]] * 64
    with pytest.raises(InputError, match="at least one rank"): run_local(lambda p: 0, 0)
