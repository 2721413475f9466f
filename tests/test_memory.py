"""The least of what the machine and every group around a process allow"""
import pytest

from cpkv.measure import GIB
from cpkv.memory import free_memory, memory_bytes

def tree_of(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root

MEMINFO = {"proc/meminfo": f"MemTotal: {900 << 20} kB\nMemAvailable: {100 << 20} kB\n"}

V2 = lambda at, most, used, cache=0: {
    f"{at}/memory.max": f"{most}\n", f"{at}/memory.current": f"{used * GIB}\n",
    f"{at}/memory.stat": f"anon 5\ninactive_file {cache * GIB}\n"}

V1 = lambda at, most, used, cache=0: {
    f"{at}/memory.limit_in_bytes": f"{most}\n", f"{at}/memory.usage_in_bytes": f"{used * GIB}\n",
    f"{at}/memory.stat": f"cache 1\ntotal_inactive_file {cache * GIB}\n"}

CG = "sys/fs/cgroup"

MACHINES = {
    "no cgroups": ({}, 100),
    "v2, no limit": ({"proc/self/cgroup": "0::/a\n"} | V2(f"{CG}/a", "max", 3), 100),
    "v2": ({"proc/self/cgroup": "0::/a\n"} | V2(f"{CG}/a", 40 * GIB, 6, 1), 35),
    "v2, the outer binds": ({"proc/self/cgroup": "0::/a/b\n"} | V2(f"{CG}/a/b", 40 * GIB, 6)
                            | V2(f"{CG}/a", 30 * GIB, 10), 20),
    "v2, the inner binds": ({"proc/self/cgroup": "0::/a/b\n"} | V2(f"{CG}/a/b", 9 * GIB, 6)
                            | V2(f"{CG}/a", 30 * GIB, 10), 3),
    "v2, its group is the root it sees": (
        {"proc/self/cgroup": "0::/outside/of/this\n"} | V2(CG, 50 * GIB, 8), 42),
    "v1": ({"proc/self/cgroup": "9:cpu:/\n4:memory:/a\n0::/\n"}
           | V1(f"{CG}/memory/a", 20 * GIB, 5, 2), 17),
    "v1, several controllers, unlimited": (
        {"proc/self/cgroup": "4:cpu,memory:/a\n"}
        | V1(f"{CG}/memory/a", 9223372036854771712, 5), 100),
    "v1 nested": ({"proc/self/cgroup": "4:memory:/a/b\n"} | V1(f"{CG}/memory/a/b", 50 * GIB, 1)
                  | V1(f"{CG}/memory/a", 20 * GIB, 12), 8),
    "more used than allowed": ({"proc/self/cgroup": "0::/a\n"} | V2(f"{CG}/a", 4 * GIB, 6), 0)}

@pytest.mark.parametrize("name", MACHINES)
def test_free_memory_is_the_least_that_anybody_allows(tmp_path, name):
    files, gib = MACHINES[name]
    assert free_memory(tree_of(tmp_path, MEMINFO | files)) == gib * GIB

def test_this_machine_has_memory():
    assert free_memory() > 1 << 20

@pytest.mark.parametrize("name", MACHINES)
def test_nobody_has_less_than_is_free(tmp_path, name):
    files, gib = MACHINES[name]
    root = tree_of(tmp_path, MEMINFO | files)
    assert gib * GIB <= memory_bytes(root) <= 900 * GIB

def test_what_a_process_may_have_is_the_tightest_limit_used_or_not(tmp_path):
    files, _ = MACHINES["v2, the outer binds"]
    assert memory_bytes(tree_of(tmp_path, MEMINFO | files)) == 30 * GIB
    assert memory_bytes(tree_of(tmp_path / "plain", MEMINFO)) == 900 * GIB

def test_a_system_without_these_files_has_what_the_machine_has(tmp_path):
    assert memory_bytes(tmp_path) == free_memory(tmp_path) > 1 << 28
