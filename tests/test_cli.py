"""The program as a user meets it: exit codes, one line, JSON, and nothing that stays behind"""
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from cpkv import cli, demo, doctor, ladder
from cpkv.cli import COMMANDS, finite, main
from cpkv.demo import find_model
from cpkv.laws import CapacityError, ConservationError, InputError, RankDied, WaitTimeout
from cpkv.options import OPTIONS
from cpkv.talks import FOLLOW_UP, shipped_text

COMMAND = [sys.executable, "-c", "import sys; from cpkv.cli import main; sys.exit(main())"]
MARK = "MARK_OF_THIS_TEST"


@pytest.fixture
def call(capsys):
    "Run the program in this process: (exit code, stdout, stderr)"
    def run(*argv):
        capsys.readouterr()
        code = main([str(a) for a in argv])
        got = capsys.readouterr()
        return code, got.out, got.err
    return run

def refused(answer) -> str:
    "The one line of an exit 2"
    code, out, err = answer
    assert (code, out) == (2, ""), answer
    assert err.startswith("cpkv: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert "Traceback" not in err
    return err

@pytest.fixture
def text(tmp_path):
    path = tmp_path/"a text.txt"
    path.write_bytes(shipped_text()[:100])
    return path

@pytest.fixture
def threads(monkeypatch):
    "The main job on threads, shorter"
    monkeypatch.setattr(cli, "run_demo", partial(demo.run_demo, backend="local", num_output=2))

@pytest.fixture
def no_work(monkeypatch):
    "A run that must not be reached"
    def ranks(*a, **kw): raise AssertionError("ranks were started")
    for chapter in (demo, ladder): monkeypatch.setattr(chapter, "run_ranks", ranks)


# -- bad input

BAD = [
    ("", "give a command"), ("dem", "no command dem, perhaps demo"),
    ("--cp 2", "an option stands after its command: cpkv COMMAND --cp"),
    ("--json - demo", "after its command: cpkv demo --json"), ("--json x bench plan", "cpkv bench --json"),
    ("--json=- demo", "cpkv demo --json=-"), ("--json -", "cpkv COMMAND --json"), ("--fast", "cpkv COMMAND --fast"),
    ("demo --speed 9", "no option --speed"),
    ("demo --pagesize 4", "perhaps --page-size"), ("demo --page 4", "no option --page"),
    ("demo here", "no argument here"), ("demo --cp", "expected one argument"),
    ("demo --cp two", "invalid int"), ("demo --cp 2.0", "invalid int"),
    ("demo --cp=", "invalid int"),
    ("demo --cp 0", "--cp must be at least 1, not 0"), ("demo --cp -1", "--cp must be at least 1"),
    ("demo --page-size 0", "--page-size must be at least 1"),
    ("demo --page-size -64", "--page-size must"),
    ("demo --page-size 1e3", "invalid int"), ("demo --chunk 0", "--chunk must"),
    ("demo --layers 0", "--layers must be at least 1"), ("demo --layers 5", "layers=5, has=4"),
    ("demo --device-tokens 0", "--device-tokens must"),
    ("demo --seed -1", "--seed must be at least 0"),
    ("demo --seed 99999999999999999999", "--seed must be at most"),
    ("demo --device-tokens 4096", "longer than the pool: more --device-tokens, or a shorter text"),
    ("demo --device-tokens 2147483647", "this machine has"),
    ("demo --cp 100000", "this machine has"), ("demo --page-size 2147483647", "this machine has"),
    ("demo --format int4", "must be fp32, bf16, fp8 or fp8_packed"),
    ("demo --format FP32", "must be fp32, bf16, fp8 or fp8_packed"),
    ("demo --placement any", "--placement must be compute_owner or cyclic"),
    ("demo --host-bytes 10", "at least a page"), ("demo --host-bytes -1", "--host-bytes must be at least 0"),
    ("demo --host-bytes 1125899906842624", "this machine has"),
    ("demo --host-bytes 1125899906842625", "--host-bytes must be at most 1125899906842624"),
    ("demo --num-speculative-tokens 2", "16a_verify"), ("demo --experiment accept", "16a_verify"),
    ("demo --transport mooncake-tcp", "15_handoff"), ("demo --transport pigeon", "must be plain"),
    ("demo --cp 2 --cp 4", "--cp is given twice"), ("demo --cp 2 --cp 2", "--cp is given twice"),
    ("demo --file a --file b", "--file is given twice"), ("demo --json a --json -", "given twice"),
    ("demo --seed 0 --model x", "--seed and --model contradict"),
    ("demo --file x --json x", "--json would overwrite the file"),
    ("demo --file ./x --json ../{here}/x", "--json would overwrite the file"),
    ("inspect x --json x", "--json would overwrite the file"),
    ("bench cache --trace x --json x", "--json would overwrite the trace"),
    ("demo --file no/such/text", "No such file"), ("demo --file .", "Is a directory"),
    ("demo --file empty", "is empty"), ("demo --model no/such", "no such checkpoint directory"),
    ("demo --model empty", "no such checkpoint directory"), ("demo --model .", "no config.json"),
    ("demo --json no/such/dir/x", "cannot write --json [path=no/such/dir/x, reason=No such file or directory]"),
    ("demo --json .", "reason=Is a directory"), ("demo --json empty/x", "reason=Not a directory"),
    ("doctor --cp 2", "no option --cp"), ("doctor --json no/such/x", "cannot write --json"),
    ("bench speed", "NAME must be plan"), ("bench cache", "needs a trace: --trace PATH"),
    ("bench plan --trace no/such", "bench plan takes no --trace"),
    ("bench cache --trace no/such", "[file=no/such, reason=No such file or directory, expected="),
    ("bench cache --trace .", "[file=., reason=Is a directory, expected="),
    ("bench cache --trace empty", "the trace has no line [file=empty, expected="),
    ("bench cache --trace text", "not a trace of requests [file=text, line=1, reason="),
    ("bench --trace text", "not a trace of requests [file=text, line=1, reason="),
    ("bench plan plan", "no argument plan"), ("bench --name plan", "no option --name"),
    ("ladder --model glm-6", "no such model, and no such directory"),
    ("ladder --model empty", "no such model"), ("ladder --model .", "no config.json"),
    ("ladder --cp 0", "--cp must be at least 1"), ("ladder --cp 1025", "--cp must be at most 1024, not 1025"),
    ("ladder --chunk 0", "--chunk must be at least 1"), ("ladder --chunk 1.5", "invalid int"),
    ("ladder --history -1", "--history must be at least 0"),
    ("ladder --history 16777216", "--history must be at most 16777215"),
    ("ladder --history 16777215", "history must be 0 to"), ("ladder --chunk 16777217", "--chunk must be at most"),
    ("ladder --model glm-5 --history 8000000 --chunk 1", "more than 16384 chunks"),
    ("ladder --cp 1024 --history 16000000", "this machine has"),
    ("ladder --format int4", "must be fp32, bf16, fp8 or fp8_packed"),
    ("ladder --draft --draft", "--draft is given twice"), ("ladder --draft yes", "no argument yes"),
    ("ladder --draft=1", "ignored explicit argument"), ("ladder --page-size 16", "no option"),
    ("ladder glm-5", "no argument glm-5"), ("ladder --json no/such/x", "cannot write --json"),
]

@pytest.mark.parametrize("words,said", BAD, ids=[w or "nothing" for w, _ in BAD])
def test_bad_input_is_one_line_that_says_what(call, tmp_path, monkeypatch, no_work, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"empty").touch()
    (tmp_path/"text").write_text("a text\n")
    before = sorted(os.listdir())
    assert said in refused(call(*words.format(here=tmp_path.name).split()))
    assert sorted(os.listdir()) == before       # a refusal writes nothing

def test_the_same_command_without_the_fault_would_run(call, no_work, capsys):
    code, _, err = call("demo", "--cp", "2", "--page-size", "16")
    assert code == 1 and "ranks were started" in err

def test_options_that_come_later_say_so_when_given_their_own_default_too(call):
    for o in OPTIONS:
        if o.later and isinstance(o.later, str):
            assert f"comes with {o.later}" in refused(call("demo", o.said, "1"))

@pytest.mark.skipif(os.geteuid() == 0, reason="root reads and writes everything")
def test_files_without_permission(call, tmp_path, text):
    text.chmod(0)
    assert "Permission denied" in refused(call("demo", "--file", text))
    tmp_path.chmod(0o500)
    assert "cannot write" in refused(call("demo", "--json", tmp_path/"x"))

@pytest.mark.parametrize("value", ["nonsense", "2", "on", "tracefile"])
def test_a_value_of_debug_that_means_nothing(call, monkeypatch, no_work, value):
    monkeypatch.setenv("CPKV_DEBUG", value)
    for words in (["demo"], ["bench", "plan"], ["ladder"]):
        assert "CPKV_DEBUG must be 0, 1" in refused(call(*words))

def test_numbers_are_not_taken_under_debug(call, monkeypatch, no_work):
    monkeypatch.setenv("CPKV_DEBUG", "1")
    for words in (["bench", "plan"], ["ladder"], ["ladder", "--model", "glm-5"]):
        assert "CPKV_DEBUG off" in refused(call(*words))

def test_a_variable_that_does_not_exist(call, monkeypatch, no_work):
    monkeypatch.setenv("CPKV_DEBGU", "1")
    assert "no variable CPKV_DEBGU" in refused(call("demo"))

def test_a_file_that_cannot_take_the_json_is_found_before_the_work(call, no_work, text):
    if not os.path.exists("/dev/full"): pytest.skip("no /dev/full")
    assert "No space left" in refused(call("demo", "--file", text, "--json", "/dev/full"))
    assert "No such file" in refused(call("demo", "--file", text, "--json", "/proc/x"))

def test_a_file_that_cannot_take_the_json_after_all(call, threads, text, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "check_json_path", lambda path: None)
    code, out, err = call("demo", "--file", text, "--json", tmp_path/"no"/"x")
    assert code == 2 and err.count("\n") == 1 and "No such file" in err and "oracle" in out

def test_a_result_that_is_there_stays_until_there_is_another(call, monkeypatch, tmp_path, no_work):
    path = tmp_path/"r.json"
    path.write_text("old")
    def run(config): raise CapacityError("too much")
    monkeypatch.setitem(COMMANDS, "bench", COMMANDS["bench"]._replace(run=run))
    refused(call("bench", "plan", "--json", path))
    assert path.read_text() == "old"

@pytest.mark.parametrize("name", ["--file", "--json"])
@pytest.mark.parametrize("there", [True, False])
def test_events_are_added_to_no_other_file_of_the_run(call, monkeypatch, tmp_path, no_work, name, there):
    path = tmp_path/"a text"
    if there: path.write_text("a text of the user")
    monkeypatch.setenv("CPKV_DEBUG", f"trace:{path}")
    said = refused(call("demo", name, f"{tmp_path}/../{tmp_path.name}/a text"))
    assert ("add events to --file" if name == "--file" else "overwrite the events of CPKV_DEBUG") in said
    if not there: return
    assert "nothing is added to it" in refused(call("demo"))
    assert path.read_text() == "a text of the user"

def test_a_trace_may_be_read_while_the_variable_still_names_it(call, monkeypatch, tmp_path):
    path = tmp_path/"t.jsonl"
    path.write_text("")
    monkeypatch.setenv("CPKV_DEBUG", f"trace:{path}")
    assert "the trace is empty" in refused(call("inspect", path))


# -- bad checkpoints

@pytest.fixture
def checkpoint(tmp_path):
    find_model(str(tmp_path/"model"), None, 0, None)
    return tmp_path/"model"

def edit(checkpoint, change):
    from safetensors.torch import load_file, save_file
    tensors = load_file(checkpoint/"model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint/"model.safetensors", metadata={"format": "pt"})

def put(name, value): return lambda t: t.update({name: value})

GATE = "model.layers.1.mlp.gate.weight"

@pytest.mark.parametrize("change,said", [
    (lambda t: t.pop(GATE), f"lacks a tensor [tensor={GATE}"),
    (lambda t: t.clear(), "lacks a tensor"),
    (put("model.layers.0.extra", torch.ones(1)), "extra tensor [tensor=model.layers.0.extra"),
    (put("lm_head.bias", torch.ones(256)), "extra tensor [tensor=lm_head.bias"),
    (put(GATE, torch.ones(7, 64)), "another shape"),
    (put(GATE, torch.ones(64, 8)), "another shape"),
    (put("model.norm.weight", torch.ones(())), "another shape")])
def test_a_checkpoint_with_other_tensors(call, checkpoint, no_work, change, said):
    edit(checkpoint, change)
    assert said in refused(call("demo", "--model", checkpoint))

def write(name, data): return lambda d: (d/name).write_bytes(data)

@pytest.mark.parametrize("damage,said", [
    (lambda d: (d/"config.json").unlink(), "no config.json"),
    (lambda d: (d/"model.safetensors").unlink(), "no .safetensors file"),
    (write("config.json", b"{"), "not JSON"), (write("config.json", b"{}"), "model_type"),
    (write("model.safetensors", b""), "not a safetensors file"),
    (write("model.safetensors", b"\xff" * 99), "not a safetensors file"),
    (lambda d: os.truncate(d/"model.safetensors", 100_000), "not a safetensors file"),
    (lambda d: os.truncate(d/"model.safetensors", 9), "not a safetensors file")])
def test_a_damaged_checkpoint(call, checkpoint, no_work, damage, said):
    damage(checkpoint)
    assert said in refused(call("demo", "--model", checkpoint))

def test_a_whole_checkpoint_is_taken(call, checkpoint, threads, text):
    code, out, _ = call("demo", "--model", checkpoint, "--file", text, "--layers", 1, "--json", "-")
    doc = json.loads(out)
    assert code == 0 and doc["layers"] == 1 and doc["config"]["model"] == str(checkpoint)


# -- results

def test_json_has_what_was_promised(call, threads, text, tmp_path):
    path = tmp_path/"r.json"
    code, out, err = call("demo", "--file", text, "--page-size", "16", "--json", path)
    doc = json.loads(path.read_text())
    assert (code, err) == (0, "") and out.isascii()
    assert (doc["schema"], doc["command"], doc["ok"]) == (1, "demo", True)
    assert doc["version"] and doc["seconds"] > 0 and doc["leaked_pages"] == 0
    assert set(doc["config"]) == {o.key for o in OPTIONS if o.command == "demo"}
    assert doc["config"] | dict(file=0) == dict(
        file=0, cp=2, page_size=16, chunk=2048, format="fp8_packed", placement="compute_owner",
        seed=0, model=None, layers=4, device_tokens=320, host_bytes=doc["host_budget_bytes"][0],
        num_speculative_tokens=None,
        transport="plain", experiment=None)     # layers, device_tokens, host_bytes as they came out
    assert {"rest_bytes_per_rank", "replicated_bytes_per_rank", "transport", "handoff_pages",
            "handoff_bytes", "host_budget_bytes", "host_used_bytes", "written_host_bytes",
            "loaded_host_bytes"} <= set(doc)
    assert doc["turns"][-1]["cached_host"] > 0 and len(doc["turns"]) == 4
    for t in doc["turns"]:
        assert {"prompt_tokens", "cached_tokens", "cached_device", "cached_host", "computed_tokens",
                "output_tokens", "received_bytes", "predicted_bytes", "output_bytes",
                "max_abs_logit_diff", "tokens_equal", "accept_length"} <= set(t)
        assert len(t["received_bytes"]) == 2 and len(t["received_bytes"][0]) == 5  # NextN

def test_json_alone_on_stdout(call, threads, text):
    code, out, err = call("demo", "--file", text, "--json", "-")
    assert (code, err) == (0, "") and json.loads(out)["ok"]

def test_the_table_fits_a_terminal(call, threads, text):
    _, out, _ = call("demo", "--file", text, "--cp", "3")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and len({len(x) for x in lines[:3]}) == 1
    assert f"{100 + len(FOLLOW_UP)}" in lines[1] and "3 ranks" in out and "NO" not in out

@pytest.mark.parametrize("role", ["_decode", "_oracle"])
def test_a_result_that_differs_is_exit_1(call, threads, text, tmp_path, monkeypatch, role):
    real = getattr(demo, role)
    def lies(*args):
        turns = real(*args)
        turns[1]["digests"][3] = "other"
        return turns
    monkeypatch.setattr(demo, role, lies)
    path = tmp_path/"r.json"
    code, out, err = call("demo", "--file", text, "--page-size", "16", "--json", path)
    doc = json.loads(path.read_text())
    assert code == 1 and not doc["ok"] and not doc["turns"][1]["kv_equal"] and doc["seconds"] > 0
    assert doc["turns"][1]["first_kv_difference"] == dict(side="decode", page=3, rank=None)
    assert "DIFFER" in out and err.count("\n") == 1
    assert "turn 2 is not what it should be: KV bytes; first page 3 on the decode side" in err

def test_a_number_that_is_none_is_null_and_exit_1(call, threads, text, monkeypatch):
    real = demo._oracle
    def lies(*args):
        turns = real(*args)
        turns[0]["logits"][0][5] = float("nan")
        return turns
    monkeypatch.setattr(demo, "_oracle", lies)
    code, out, err = call("demo", "--file", text, "--json", "-")
    assert code == 1 and json.loads(out)["turns"][0]["max_abs_logit_diff"] is None
    assert "logits" in err
    assert finite([1.0, float("inf"), {"a": float("nan")}]) == [1.0, None, {"a": None}]

@pytest.mark.parametrize("error,code", [
    (ConservationError("page has two holders", page=7), 1),
    (WaitTimeout("rank 1 waited", rank=1), 3),
    (RankDied("rank 1 died:\n  SIGKILL", rank=1), 3), (RuntimeError("no idea"), 1)])
def test_a_failure_in_the_work_is_written(call, monkeypatch, tmp_path, error, code):
    def run(config): raise error
    monkeypatch.setitem(COMMANDS, "bench", COMMANDS["bench"]._replace(run=run))
    got, out, err = call("bench", "plan", "--json", tmp_path/"r.json")
    doc = json.loads((tmp_path/"r.json").read_text())
    assert (got, out) == (code, "") and doc["error"]["type"] == type(error).__name__
    assert doc["command"] == "bench" and not doc["ok"] and doc["config"] == {"name": "plan", "trace": None}
    known = not isinstance(error, RuntimeError)
    assert ("Traceback" in err) == (not known) and (err.count("\n") == 1) == known

def test_what_was_chosen_is_written_also_if_a_rank_died(call, threads, text, tmp_path, monkeypatch):
    def died(*args, **how): raise RankDied("rank 1 died: SIGKILL", rank=1)
    monkeypatch.setattr(demo, "run_ranks", died)
    code, _, err = call("demo", "--file", text, "--json", tmp_path/"r.json")
    config = json.loads((tmp_path/"r.json").read_text())["config"]
    assert code == 3 and "SIGKILL" in err
    assert config["layers"] == 4 and config["device_tokens"] > 0 and config["host_bytes"] > 0

def test_a_refusal_in_the_work_is_not(call, monkeypatch, tmp_path):
    def run(config): raise CapacityError("too much")
    monkeypatch.setitem(COMMANDS, "bench", COMMANDS["bench"]._replace(run=run))
    refused(call("bench", "--json", tmp_path/"r.json"))
    assert not (tmp_path/"r.json").exists()

def test_a_machine_that_lacks_something_is_told_and_written(call, monkeypatch, tmp_path):
    bad = doctor.check("loopback", False, "nothing", "plug it in")
    absent = doctor.check("gpu", False, "", required=False)
    monkeypatch.setattr(cli, "run_doctor", lambda: [bad, absent])
    code, out, err = call("doctor", "--json", tmp_path/"r.json")
    assert code == 2 and "WRONG    loopback" in out and "absent   gpu" in out
    assert err == "cpkv: wrong here: loopback (plug it in)\n"
    assert json.loads((tmp_path/"r.json").read_text())["checks"][0] == bad

def test_a_variable_that_does_not_exist_is_wrong_and_not_missing(call, monkeypatch):
    monkeypatch.setattr(doctor, "run_ranks", lambda *a, **kw: [[0, 1], [0, 1]])
    monkeypatch.setenv("CPKV_FOO", "1")
    code, out, err = call("doctor")
    assert code == 2 and "WRONG    CPKV variables    CPKV_FOO=1\n" in out
    assert err == "cpkv: wrong here: CPKV variables (there is no variable CPKV_FOO, unset it)\n"

@pytest.mark.parametrize("words", ["--help", "demo --help", "ladder --help", "bench --help", "--version"])
def test_help_is_help(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as e: main(words.split())
    out = capsys.readouterr().out
    assert not e.value.code and max(map(len, out.splitlines())) <= 80
    if words == "--help": assert all(c in out for c in COMMANDS)
    if words == "demo --help":
        assert all(o.said in out for o in cli.options_of("demo")) and "0 to 1125899906842624" in out
    if words == "ladder --help":
        assert all(f"; {n} " in " ".join(out.split()) for n in ("1 to 1024", "0 to 16777215", "1 to 16777216"))

def test_a_bar_is_cleared_before_a_line(monkeypatch, capsys, threads, text):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["demo", "--file", str(text), "--chunk", "40"]) == 0
    err = capsys.readouterr().err
    assert "turn 1 [#######" in err and err.endswith("\r\x1b[K") and "\n" not in err
    assert main(["demo", "--cp", "0"]) == 2
    assert capsys.readouterr().err.startswith("\r\x1b[Kcpkv: ")

def test_without_a_terminal_there_is_no_bar(call, threads, text):
    assert call("demo", "--file", text, "--chunk", "40")[2] == ""


# -- the real program

def run(*words, **env):
    return subprocess.run([*COMMAND, *map(str, words)], env=os.environ | env, text=True, timeout=60,
                          stdin=subprocess.DEVNULL, capture_output=True)

def marked(mark: str) -> list[str]:
    "Processes that were started with a variable, zombies left out"
    out = []
    for p in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (p/"environ").read_bytes(): out.append(p.name)
        except OSError: continue
    return out

def test_the_program_refuses():
    p = run("demo", "--page-size", "0", CPKV_DEBUG="1")
    assert "--page-size must be at least 1" in refused((p.returncode, p.stdout, p.stderr))

def test_a_reader_that_goes_is_no_fault():
    words = " ".join(f"'{w}'" for w in [*COMMAND, "bench", "plan", "--json", "-"])
    script = f"{words} | true; echo ${{PIPESTATUS[0]}}"
    p = subprocess.run(["bash", "-c", script], text=True, timeout=60, capture_output=True)
    assert (p.stdout, p.stderr) == ("0\n", "")

@pytest.mark.parametrize("where,said", [(">&-", "stdout is closed"),
                                        ("> /dev/full", "cannot write to stdout [reason=No space left on device]")])
@pytest.mark.parametrize("more", ["", "--json -"])
def test_a_stdout_that_takes_nothing_is_one_line(where, said, more):
    if "full" in where and not os.path.exists("/dev/full"): pytest.skip("no /dev/full")
    script = "import sys; from cpkv import cli; cli.COMMANDS['bench'] = cli.COMMANDS['bench']._replace(" \
             "run=lambda c: dict(ok=True, a_us=1.0)); sys.exit(cli.main())"
    words = f"'{sys.executable}' -c \"{script}\" bench plan {more}"
    p = subprocess.run(["bash", "-c", f"{words} {where}"], text=True, timeout=60, capture_output=True)
    assert refused((p.returncode, p.stdout, p.stderr)) == f"cpkv: {said}\n"

def test_a_full_stdout_keeps_no_json_from_its_file(tmp_path, monkeypatch, capsys):
    def full(text): raise InputError("cannot write to stdout")
    monkeypatch.setattr(cli, "tell", full)
    monkeypatch.setitem(COMMANDS, "bench", COMMANDS["bench"]._replace(run=lambda c: dict(ok=True, a_us=1.0)))
    assert main(["bench", "plan", "--json", str(tmp_path/"r")]) == 2
    assert json.loads((tmp_path/"r").read_text())["ok"]

KILLS = """
import json, multiprocessing as mp, os, signal, sys, threading, time
from cpkv.cli import main

def cpu(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

def fault(victim, hit):
    "In the middle: when the first prefill rank and the oracle have computed for a while"
    while True:
        time.sleep(.02)
        ranks = sorted(mp.active_children(), key=lambda p: int(p.name.split("-")[-1]))
        if len(ranks) == 4 and min(cpu(ranks[r].pid) for r in (0, 3)) > .6: break
    hit.append(time.monotonic())
    if victim in (1, 2, 3): os.kill(ranks[victim].pid, signal.SIGKILL)
    else: os.kill(os.getpid(), getattr(signal, victim))

for victim in (1, 2, 3, "SIGINT", "SIGTERM"):
    hit = []
    threading.Thread(target=fault, args=(victim, hit), daemon=True).start()
    code = main(["demo", "--json", sys.argv[1] + str(victim)])
    took = time.monotonic() - hit[0]
    print(json.dumps([victim, code, took, len(mp.active_children())]), flush=True)
"""

def test_who_dies_in_the_middle_is_named_and_nothing_runs_on(tmp_path):
    mark, temporary = f"{MARK}={os.getpid()}.{time.time()}", tmp_path/"temporary"
    temporary.mkdir()
    env = os.environ | dict([mark.split("=")], TMPDIR=str(temporary))
    p = subprocess.run([sys.executable, "-c", KILLS, tmp_path/"r"], text=True, timeout=120, env=env,
                       capture_output=True)
    assert p.returncode == 0, p.stderr
    answers, lines = list(map(json.loads, p.stdout.splitlines())), p.stderr.splitlines()
    assert [a[:2] for a in answers] == [[1, 3], [2, 3], [3, 3], ["SIGINT", 130], ["SIGTERM", 130]]
    for victim, _, seconds, left in answers:
        assert seconds < 10 and left == 0
        line = lines.pop(0)
        if isinstance(victim, str):
            assert line == "cpkv: interrupted" and not Path(f"{tmp_path}/r{victim}").exists()
            continue
        role = ("prefill", "prefill", "decode", "oracle")[victim]
        assert line == f"cpkv: rank {victim} ({role}) died: SIGKILL [rank={victim}]"
        doc = json.loads(Path(f"{tmp_path}/r{victim}").read_text())
        assert not doc["ok"] and doc["error"]["type"] == "RankDied" and doc["command"] == "demo"
        assert doc["error"]["facts"] == dict(rank=victim) and doc["config"]["cp"] == 2
    assert lines == []
    deadline = time.monotonic() + 10
    while marked(mark) and time.monotonic() < deadline: time.sleep(.1)
    assert marked(mark) == [] and list(temporary.iterdir()) == []

def test_the_search_for_processes_can_find_one():
    mark = f"{MARK}={os.getpid()}.child"
    p = subprocess.Popen(["sleep", "60"], env=os.environ | dict([mark.split("=")]))
    try:
        for _ in range(100):                # until the new program's environment is in place
            if found := marked(mark): break
            time.sleep(0.02)
        assert found == [str(p.pid)]
    finally:
        p.kill()
        p.wait()
