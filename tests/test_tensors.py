"Names first, headers second, bytes last; and nothing unsound is read"
import json

import pytest
import torch

import cpkv.tensors
from cpkv.laws import InputError
from cpkv.tensors import INDEX, Stored, find_tensors, look_up, read_tensors, write_tensors

pytest.importorskip("safetensors")
MADE = {"a": torch.arange(6.).view(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.zeros(0, 5, dtype=torch.int32),
        "d": torch.tensor(3.), "e": torch.tensor([1., -2.]).to(torch.float8_e4m3fn)}


def index(folder, **files):
    (folder / INDEX).write_text(json.dumps(dict(metadata={}, weight_map=files)))

@pytest.fixture
def two(tmp_path):
    write_tensors(tmp_path / "one.safetensors", {k: MADE[k] for k in "ab"})
    write_tensors(tmp_path / "two.safetensors", {k: MADE[k] for k in "cde"})
    return tmp_path

def test_what_is_written_is_found_and_read(two):
    for with_index in (False, True):
        if with_index: index(two, **{k: ("one" if k in "ab" else "two") + ".safetensors" for k in MADE})
        files = find_tensors(two)
        assert {k: p.name[:3] for k, p in files.items()} == dict(a="one", b="one", c="two", d="two", e="two")
        facts = look_up(files)
        assert facts["c"] == Stored((0, 5), "I32") and facts["d"] == Stored((), "F32") and facts["e"].dtype == "F8_E4M3"
        got = read_tensors({k: files[k] for k in "edcba"})
        assert list(got) == [*"edcba"] and all(got[k].dtype == MADE[k].dtype and got[k].shape == MADE[k].shape for k in got)
        assert all(torch.equal(got[k].float(), MADE[k].float()) for k in got)

def test_views_are_written_as_what_they_show(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"t": MADE["a"].t(), "u": MADE["a"][:, 1]})
    got = read_tensors(find_tensors(tmp_path))
    assert torch.equal(got["t"], MADE["a"].t()) and torch.equal(got["u"], MADE["a"][:, 1])

def test_a_tensor_costs_no_memory_before_it_is_used(tmp_path):
    "A window on the file: 256 MB appear at once, and none of them in memory"
    write_tensors(tmp_path / "x.safetensors", {"w": torch.zeros(1 << 26)})
    def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
    try: before = resident()
    except OSError: pytest.skip("no /proc here")
    w = read_tensors(find_tensors(tmp_path))["w"]
    assert w.nbytes == 1 << 28 and resident() - before < 1 << 26

def test_files_that_hold_nothing_wanted_are_not_opened(two, monkeypatch):
    index(two, a="one.safetensors", b="one.safetensors", c="gone.safetensors")
    (two / "two.safetensors").write_bytes(b"rubbish")
    files, opened, open_it = find_tensors(two), [], cpkv.tensors._opened
    monkeypatch.setattr(cpkv.tensors, "_opened", lambda path: opened.append(path.name) or open_it(path))
    wanted = {"a": files["a"]}
    assert look_up(wanted)["a"].shape == (2, 3) and torch.equal(read_tensors(wanted)["a"], MADE["a"])
    assert set(opened) == {"one.safetensors"}
    with pytest.raises(InputError, match="not there.*gone.safetensors"): look_up(files)

def test_of_two_copies_the_index_decides(two):
    "Real checkpoints have tensors in two files"
    write_tensors(two / "two.safetensors", {"a": MADE["a"] + 1})
    with pytest.raises(InputError, match="twice.*tensor=a"): find_tensors(two)
    for name, more in (("one", 0), ("two", 1)):
        index(two, a=f"{name}.safetensors")
        assert torch.equal(read_tensors(find_tensors(two))["a"], MADE["a"] + more)

@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ""}}',
                                  '{"weight_map": {"a": "../one.safetensors"}}', '{"weight_map": {"a": "/etc/passwd"}}', "\xff"])
def test_an_index_that_is_none(two, text):
    (two / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="index"): find_tensors(two)

def test_an_index_beside_a_whole_checkpoint(two):
    write_tensors(two / "model.safetensors", MADE)
    index(two, a="one.safetensors")
    with pytest.raises(InputError, match="does not know.*model.safetensors"): find_tensors(two)
    index(two, a="model.safetensors")
    assert torch.equal(read_tensors(find_tensors(two))["a"], MADE["a"])

def test_a_name_that_its_file_lacks(two):
    index(two, a="one.safetensors", z="one.safetensors")
    with pytest.raises(InputError, match="lacks.*tensor=z"): look_up(find_tensors(two))

@pytest.mark.parametrize("keep", [0, 7, 8, 60, -1])
def test_a_cut_file(two, keep):
    whole = (two / "one.safetensors").read_bytes()
    (two / "one.safetensors").write_bytes(whole[:keep])
    with pytest.raises(InputError, match="not a safetensors file.*one.safetensors"): find_tensors(two)

def test_an_empty_directory(tmp_path):
    with pytest.raises(InputError, match="no .safetensors"): find_tensors(tmp_path)

def test_without_the_library_it_says_what_to_install(two, monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(InputError, match="pip install"): find_tensors(two)
