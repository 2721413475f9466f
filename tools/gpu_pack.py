"""build/wheels: the pure-Python packages that a GPU machine without a network may lack

Walks what `make gpu` imports down the requirements of this environment, and fetches the wheels that
run everywhere. Compiled packages (torch, numpy, Triton) are the machine's own.
"""
import re, subprocess, sys, zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT/"build"/"wheels"
ROOTS = "nbdev", "pytest", "hypothesis", "fastcore", "execnb", "setuptools"
# watchdog is Python only, yet its wheel is named for Linux
PLATFORMS = "--platform", "any", "--platform", "manylinux2014_x86_64"
WORKS_WITHOUT_C = {"pyyaml"}            # its compiled half is optional, but every wheel has it
THEIRS = {"torch", "numpy", "triton"}   # never replaced


def canonical(name: str) -> str: return re.sub(r"[-_.]+", "-", name).lower()

def closure(roots: tuple[str, ...]) -> dict[str, str]:
    "Package -> version of all that the roots need here"
    from packaging.requirements import Requirement
    found, todo = {}, [*roots]
    while todo:
        name = canonical(todo.pop())
        if name in found or name in THEIRS: continue
        try: dist = metadata.distribution(name)
        except metadata.PackageNotFoundError: continue
        found[name] = dist.version
        for r in map(Requirement, dist.requires or ()):
            if not r.marker or r.marker.evaluate({"extra": ""}): todo.append(r.name)
    return found

def fetch(requirement: str) -> bool:
    "Download one wheel without compiled code"
    cmd = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q",
           "--no-deps", "--only-binary", ":all:", "--implementation", "py", "--abi", "none",
           *PLATFORMS, "-d", str(WHEELS), requirement]
    return subprocess.run(cmd, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0

def repack(name: str) -> None:
    "A wheel of the Python files alone, from what is installed here"
    dist = metadata.distribution(name)
    keep = [f for f in dist.files if ".." not in f.parts and f.suffix in (".py", "")]
    with zipfile.ZipFile(WHEELS/f"{name}-{dist.version}-py3-none-any.whl", "w") as z:
        for f in keep: z.write(dist.locate_file(f), f.as_posix())

def main() -> None:
    WHEELS.mkdir(parents=True, exist_ok=True)
    for old in WHEELS.glob("*.whl"): old.unlink()
    compiled = []
    for name, version in sorted(closure(ROOTS).items()):
        # the pinned version, else the newest that is pure Python
        if name in WORKS_WITHOUT_C: repack(name)
        elif not (fetch(f"{name}=={version}") or fetch(name)): compiled.append(name)
    got = sorted(WHEELS.glob("*.whl"))
    if not got: sys.exit("gpu-pack: nothing fetched; is there a network?")
    size = sum(p.stat().st_size for p in got) / 2**20
    print(f"gpu-pack: {len(got)} wheels, {size:.0f} MiB, in build/wheels")
    if compiled: print("gpu-pack: compiled, so the machine must have its own:", *compiled)

if __name__ == "__main__": main()
