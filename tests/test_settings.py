"""settings.ini is the source; everything that says the same thing elsewhere agrees with it"""
import re, tomllib
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ini = ConfigParser(interpolation=None)
ini.read(ROOT/"settings.ini", encoding="utf-8")
S = ini["DEFAULT"]
PYPROJECT = tomllib.loads((ROOT/"pyproject.toml").read_text(encoding="utf-8"))
PINS = dict(line.split("==") for line in (ROOT/"requirements.txt").read_text("utf-8").split("\n")
            if "==" in line and not line.startswith("#"))


def canonical(name: str) -> str: return re.sub(r"[-_.]+", "-", name).lower()

def installed():
    try: return metadata.distribution("cpkv")
    except metadata.PackageNotFoundError: pytest.skip("cpkv is not installed, only on the path")

@pytest.mark.parametrize("key", ["lib_path", "nbs_path", "doc_path", "branch", "tst_flags"])
def test_nbdev_reads_what_settings_say(key):
    assert PYPROJECT["tool"]["nbdev"][key] == S[key]

def test_project_table_agrees():
    project = PYPROJECT["project"]
    assert project["name"] == S["lib_name"] and project["license"] == S["license"]
    assert project["requires-python"] == f">={S['min_python']}"
    assert not {"version", "description", "dependencies"} & project.keys()   # settings.ini's

def test_library_version_is_settings_version():
    import cpkv
    assert cpkv.__version__ == S["version"]

def test_installed_metadata_comes_from_settings():
    dist = installed()
    assert dist.version == S["version"] and dist.metadata["Summary"] == S["description"]
    always = [r for r in dist.requires if "extra ==" not in r]
    requires = {canonical(re.split(r"[<>=;\[ ]", r)[0]) for r in always}
    assert requires == {"torch", "numpy"}
    extras = {canonical(k.removeprefix("extra_")) for k in S if k.startswith("extra_")} | {"dev"}
    assert set(map(canonical, dist.metadata.get_all("Provides-Extra"))) == extras

def test_nbdev_test_is_a_command():
    scripts = {e.name: e.value for e in installed().entry_points if e.group == "console_scripts"}
    assert scripts == {"cpkv": "cpkv.cli:main", "nbdev_test": "nbdev.test:nbdev_test"}

def test_every_asked_for_package_is_pinned():
    asked = S["requirements"].split() + S["extra_docs"].split() + S["extra_hf"].split()
    asked += [r for r in S["dev_requirements"].split() if not r.startswith("cpkv[")]
    asked += S["extra_mooncake-cpu"].split()
    names = {canonical(re.split(r"[<>=;\[ ]", r)[0]) for r in asked}
    assert names - set(map(canonical, PINS)) == set()

def test_pins_lie_inside_the_ranges():
    from packaging.requirements import Requirement
    for r in map(Requirement, S["requirements"].split()): assert r.specifier.contains(PINS[r.name])
    from environment import TRITON     # tools/environment.py: the Triton of a CPU build
    assert Requirement(S["extra_triton"].split(";")[0]).specifier.contains(TRITON.split("==")[1])

def test_one_command_line_says_one_python_range():
    venv = (ROOT/"tools"/"environment.py").read_text(encoding="utf-8")
    assert S["min_python"] == "3.11" and "SUPPORTED = (3, 11), (3, 13)" in venv
