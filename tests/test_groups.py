"""Laws of ranks as processes: bytes, tags, order, bounds"""
import os
import socket
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rank_functions as rf
from cpkv.groups import FRAME_TAG, Mail, bytes_of, check_backend, frame_bytes, peer_error, tag_of
from cpkv.launch import loopback, run_ranks, start_server
from cpkv.laws import ConfigError, OrderError, PeerError, WaitTimeout

@pytest.fixture(scope="module")
def healthy() -> list[dict]:
    "One run of three real ranks serves many laws"
    return run_ranks(rf.work, 3, timeout=20)

def test_every_result_is_right(healthy):
    assert [r["wrong"] for r in healthy] == [[], [], []]
    assert all((r["threads"], r["backend"]) == (1, "gloo") for r in healthy)
    assert len({r["pid"] for r in healthy} | {os.getpid()}) == 4

def test_every_lane_has_the_same_order_on_every_rank(healthy):
    assert all(r["lines"] == healthy[0]["lines"] for r in healthy)

def test_received_bytes_are_exact(healthy):
    assert all(r["received"] == rf.predicted(3) and r["control"] == 0 for r in healthy)
    assert healthy[0]["prefetch"] == {i: 2 * 5 * 8 for i in range(4)}

def test_processes_and_threads_write_the_same_ledger(healthy):
    local = run_ranks(rf.work, 3, backend="local")
    assert [r["lines"] for r in local] == [r["lines"] for r in healthy]

def test_debug_names_every_kind_of_difference_and_nobody_hangs():
    kinds = tuple(rf.ODD)
    ranks = run_ranks(rf.differ, 3, kinds, debug=True, timeout=20)
    assert ranks[0] == ranks[1] == ranks[2]
    for kind, said in zip(kinds, ranks[0]):
        a, b = said.removesuffix(" [ranks=(0, 1)]").split(", but ")
        assert a.startswith("rank 0 issued main#") and b.startswith("rank 1 issued "), (kind, said)
        assert a.removeprefix("rank 0 ") != b.removeprefix("rank 1 "), kind

def test_debug_tells_swapped_batches_apart():
    with pytest.raises(OrderError, match="digest=0xb.*digest=0x16"):
        run_ranks(rf.swapped_batches, 2, debug=True)

def test_without_debug_swapped_batches_are_never_believed():
    with pytest.raises(WaitTimeout, match=r"rank \d waited 1 s for rank \d in main#0 .*digest=0x"):
        run_ranks(rf.swapped_batches, 2, timeout=1)

def test_a_broadcast_fills_what_was_poisoned_in_processes_and_in_threads():
    ranks = run_ranks(rf.spread, 3, timeout=20)
    assert [r["wrong"] for r in ranks] == [[], [], []]
    assert [(r["received"], r["prefetch"]) for r in ranks] == [rf.spread_bytes(r, 3) for r in range(3)]
    assert all(r["lines"] == ranks[0]["lines"] for r in ranks)
    assert ranks == run_ranks(rf.spread, 3, backend="local")

def test_debug_names_every_difference_in_a_broadcast():
    kinds = tuple(rf.SOURCES)
    ranks = run_ranks(rf.differ_in_source, 3, kinds, debug=True, timeout=20)
    assert ranks[0] == ranks[1] == ranks[2]
    for kind, said in zip(kinds, ranks[0]):
        a, b = said.removesuffix(" [ranks=(0, 1)]").split(", but ")
        assert a.startswith("rank 0 issued main#") and "broadcast(" in a and "src=2" in a, (kind, said)
        assert a.removeprefix("rank 0 ") != b.removeprefix("rank 1 "), kind

def test_without_debug_a_broadcast_for_another_batch_is_never_believed():
    with pytest.raises(WaitTimeout, match=r"rank \d waited 1 s for rank \d in main#0 broadcast.*digest=0x"):
        run_ranks(rf.swapped_sources, 2, timeout=1)

def test_rank_and_size_are_those_of_the_worlds_own_groups():
    for r, got in enumerate(run_ranks(rf.grid, 4, timeout=20)):
        assert got == {"rank": r // 2, "size": 2, "got": [r % 2, r % 2 + 2], "received": {-1: 8},
                       "single": (0, 1, [[5]], {-1: 0})}

@given(st.lists(st.text("ab#()", max_size=30), min_size=1, unique=True))
def test_tags_tell_texts_apart_and_are_never_those_of_agreements(texts):
    tags = [tag_of(t) for t in texts]
    assert len(set(tags)) == len(tags) and all(0 <= t < FRAME_TAG < 2**31 for t in tags)

def test_letters_are_numbered_by_pair_and_say_what_they_are():
    mail, x = Mail(None), torch.zeros(2, 3)
    pairs = [(x, 0, 1), (x, 0, 1), (x, 1, 0), (x.T, 0, 1), (x.int(), 0, 1)]
    said = [mail.letter(*p)[1]() for p in pairs]
    assert [s.split()[1] for s in said] == ["#0", "#1", "#0", "#2", "#3"] and "[3, 2]" in said[3]
    again = Mail(None)
    assert [again.letter(*p)[0] for p in pairs] == [tag_of(s) for s in said]

@pytest.mark.parametrize("length,R,want", [(0, 1, 0), (0, 2, 1024), (1016, 2, 1024),
                                           (1017, 3, 2050)])
def test_an_agreement_costs_a_frame_or_what_is_longer(length, R, want):
    assert frame_bytes(length, R) == want

@pytest.mark.parametrize("dtype", rf.DTYPES)
def test_bytes_are_a_view(dtype):
    x = rf.part(0, dtype, (3, 5))
    assert bytes_of(x).data_ptr() == x.data_ptr() and bytes_of(x).numel() == x.nbytes

@pytest.mark.parametrize("text,kind", [
    ("Timed out waiting 2000ms for recv operation", WaitTimeout),
    ("Application timeout caused pair closure", WaitTimeout),
    ("Connection closed by peer [::1]:1", PeerError), ("Connection reset by peer", PeerError)])
def test_failures_are_sorted(text, kind):
    e = peer_error(RuntimeError(text), "main#1 all_gather()", 0, 2, 5.)
    assert type(e) is kind and e.facts == {"rank": 0, "peer": 2} and e.exit_code == 3
    assert "rank 0" in str(e) and "rank 2 in main#1" in str(e)

def test_nccl_needs_a_gpu_a_rank():
    check_backend("nccl", 2, 2), check_backend("gloo", 8, 0)
    with pytest.raises(ConfigError, match="nccl needs a GPU a rank"): check_backend("nccl", 2, 1)
    with pytest.raises(ConfigError, match="gloo or nccl"): check_backend("mpi", 2, 2)

@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs enough")
def test_nccl_is_refused_in_the_ranks():
    with pytest.raises(ConfigError, match="nccl needs a GPU a rank"):
        run_ranks(rf.start, 2, [{}, {}], backend="nccl")

@pytest.mark.cuda
def test_ranks_share_a_gpu_through_pinned_memory():
    assert run_ranks(rf.staged, 2) == [["cuda", [1.0, 2.0], 2.0]] * 2

SCRIPT = """
import torch, cpkv.groups
world = cpkv.groups.world_from_env(timeout=20)
out = world.all_gather(torch.tensor([world.rank + 5]), layer=1).wait().flatten().tolist()
world.check_start({"page_size": 64})
print("seen", world.backend, out, world.ledger.received(), torch.get_num_threads(), flush=True)
world.close()
"""

def test_the_world_of_an_environment():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1]),
                "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": loopback()}
    context = start_server()
    queue, jobs = context.SimpleQueue(), [meet | {"RANK": str(r)} for r in range(2)]
    ranks = [context.Process(target=rf.from_env, args=(j, queue), daemon=True) for j in jobs]
    for p in ranks: p.start()
    for p in ranks: p.join(30)
    assert [p.exitcode for p in ranks] == [0, 0]
    assert [queue.get(), queue.get()] == [("gloo", 2, [5, 6], {1: 8}, 1, False)] * 2

@pytest.mark.slow
def test_the_world_of_torchrun(tmp_path):
    (tmp_path / "ranks.py").write_text(SCRIPT)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    cmd = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*cmd, "ranks.py"], cwd=tmp_path, env=env, timeout=100,
                          capture_output=True, text=True)
    assert done.stdout.count("seen gloo [5, 6] {1: 8} 1") == 2, done.stdout + done.stderr
