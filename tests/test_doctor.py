"""Each thing that can be missing is found missing, with a hint"""
import tempfile

import pytest
import torch

from cpkv import doctor
from cpkv.doctor import check, optional, release, run_doctor, within
from cpkv.laws import InputError, WaitTimeout


@pytest.fixture
def quick(monkeypatch):
    "Without processes"
    monkeypatch.setattr(doctor, "run_ranks", lambda *a, **kw: [[0, 1], [0, 1]])

def found(name: str) -> dict:
    [c] = [c for c in run_doctor() if c["name"] == name]
    assert set(c) == {"name", "ok", "found", "hint", "required"} and isinstance(c["found"], str)
    assert not (c["ok"] and c["hint"]) and (c["ok"] or c["hint"])
    return c

def test_this_machine_has_what_is_required():
    checks = run_doctor()
    assert [c for c in checks if c["required"] and not c["ok"]] == []
    assert len({c["name"] for c in checks}) == len(checks)

def test_two_ranks_do_not_hear_the_debug_of_this_process(monkeypatch):
    monkeypatch.setenv("CPKV_DEBUG", "nonsense")
    seen = {}
    monkeypatch.setattr(doctor, "run_ranks", lambda *a, **kw: seen.update(kw) or [[0, 1], [0, 1]])
    assert found("two ranks")["ok"] and seen["env"] == [
        {"CPKV_DEBUG": "0", "CPKV_NVTX": "0"}] * 2
    assert not found("CPKV variables")["ok"] and "0, 1" in found("CPKV variables")["hint"]

@pytest.mark.parametrize("answer", [[[0, 1], [1, 0]], WaitTimeout("rank 0 waited 30 s for rank 1")])
def test_ranks_that_do_not_hear_each_other(monkeypatch, answer):
    def ranks(*a, **kw):
        if isinstance(answer, Exception): raise answer
        return answer
    monkeypatch.setattr(doctor, "run_ranks", ranks)
    [c] = [c for c in run_doctor() if c["name"] == "two ranks"]
    assert not c["ok"] and c["required"]

@pytest.mark.parametrize("text,want", [("2.13.0+cpu", (2, 13)), ("2.9", (2, 9)), ("3", (3,)),
                                       ("2.0a0", (2,))])
def test_release(text, want): assert release(text) == want

@pytest.mark.parametrize("version,ok", [("2.10.9", False), ("2.11.0", True), ("2.13.1+cu126", True),
                                        ("2.14.0", False), ("3.0", False), ("1.99", False)])
def test_versions(quick, monkeypatch, version, ok):
    monkeypatch.setattr(torch, "__version__", version)
    assert found("torch")["ok"] == ok == within("torch", version, (2, 11), (2, 13))["ok"]

@pytest.mark.parametrize("python,ok", [("3.10.1", False), ("3.11.0", True), ("3.13.9", True),
                                       ("3.14.0", False)])
def test_pythons(quick, monkeypatch, python, ok):
    monkeypatch.setattr(doctor.platform, "python_version", lambda: python)
    assert found("python")["ok"] == ok

def test_what_is_optional_is_never_required():
    assert optional("no-such-package", "no_such_module", "hf", "x") == dict(
        name="no-such-package", ok=False, found="not installed", required=False,
        hint="pip install 'cpkv[hf]' (x)")
    assert optional("no-such-package", "json", "hf", "x")["ok"]     # importable, however it came

def test_a_document_that_was_changed(quick, monkeypatch):
    def text(): raise InputError("the shipped text was changed")
    monkeypatch.setattr(doctor, "shipped_text", text)
    assert not found("text")["ok"]

def test_a_folder_that_cannot_be_written(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path/"gone"))
    assert "TMPDIR" in found("temporary folder")["hint"]

@pytest.mark.parametrize("memory,ok", [(1 << 30, False), (4 << 30, True)])
def test_memory(quick, monkeypatch, memory, ok):
    monkeypatch.setattr(doctor, "memory_bytes", lambda: memory)
    assert found("memory")["ok"] == ok and not found("memory")["required"]

@pytest.mark.parametrize("name,value,ok", [
    ("CPKV_DEBUG", "yes", False), ("CPKV_DEBGU", "1", False), ("CPKV_SEED", "1", False),
    ("CPKV_DEBUG", "1", True), ("CPKV_DEBUG", "", True), ("XCPKV_DEBUG", "yes", True)])
def test_variables(quick, monkeypatch, name, value, ok):
    monkeypatch.setenv(name, value)
    assert found("CPKV variables")["ok"] == ok

def test_a_list_that_is_empty_is_not_ok(): assert check("a", [], 1)["ok"] is False
