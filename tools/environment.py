"""Make `.venv` or bring it up to the pins; quick when nothing changed

Needs the standard library only, so any Python from 3.11 to 3.13 can run it.
"""
import hashlib, os, shutil, subprocess, sys, sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT/".venv"
PY = VENV/"bin"/"python"
STAMP = VENV/"cpkv.stamp"   # written last, so a broken-off installation is taken up again
INPUTS = "requirements.txt", "settings.ini", "pyproject.toml", "setup.py", "tools/environment.py"
TRITON = "triton==3.9.0"
SUPPORTED = (3, 11), (3, 13)


def say(text: str) -> None: print(f"venv: {text}", flush=True)

def run(*cmd: str, **kw) -> subprocess.CompletedProcess:
    return subprocess.run([str(c) for c in cmd], cwd=ROOT, stdin=subprocess.DEVNULL, **kw)

def pip(*args: str) -> None:
    if run(PY, "-m", "pip", "--disable-pip-version-check", *args).returncode:
        sys.exit(f"venv: `pip {' '.join(args)}` failed; its message stands above")

def stamp_text() -> str:
    "What the environment was made from: the pins, the place, the interpreter"
    h = hashlib.sha256()
    for name in INPUTS: h.update((ROOT/name).read_bytes())
    return f"{h.hexdigest()}\n{ROOT}\n"

def has_module(name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return run(PY, "-c", code).returncode == 0

def version_of(python) -> tuple[int, int] | None:
    "(major, minor) of an interpreter, None if it does not start"
    code = "import sys; print(*sys.version_info[:2])"
    try: out = run(python, "-c", code, capture_output=True, text=True)
    except OSError: return None
    return tuple(map(int, out.stdout.split())) if out.returncode == 0 else None

def create() -> None:
    "A fresh environment; an old one in the way is replaced"
    if VENV.exists(): say("the one here was made elsewhere or by another Python: made anew")
    if run(sys.executable, "-m", "venv", "--clear", VENV).returncode:
        sys.exit("venv: this Python cannot make one (Debian: apt-get install python3-venv)")

def libibverbs() -> None:
    "Mooncake's wheel links it, also for TCP; never a reason to fail"
    if not sys.platform.startswith("linux"): return
    if any((Path(d)/"libibverbs.so.1").exists() for d in libdirs()): return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                     env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
        install = "apt-get", "install", "-y", "--no-install-recommends", "libibverbs1"
        if run(*install, **quiet).returncode == 0: return
        run("apt-get", "update", **quiet)
        if run(*install, **quiet).returncode == 0: return
    say("for the Mooncake transport install libibverbs1 (Debian: apt-get install libibverbs1)")

def libdirs() -> list[str]:
    arch = sysconfig.get_config_var("MULTIARCH") or ""
    dirs = "/usr/lib", "/usr/lib64", "/usr/local/lib", f"/usr/lib/{arch}", f"/lib/{arch}"
    return [d for d in dirs if Path(d).is_dir()]

def main() -> None:
    if not SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
        sys.exit(f"venv: Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}; "
                 "name one: make venv PYTHON=python3.12")
    old = STAMP.read_text(encoding="utf-8") if STAMP.exists() else ""
    moved = bool(old) and old.splitlines()[1:] != [str(ROOT)]
    have = version_of(PY)
    if moved or have is None or not SUPPORTED[0] <= have <= SUPPORTED[1]: create()
    elif old == stamp_text(): return
    STAMP.unlink(missing_ok=True)
    say("installing the pinned packages (minutes the first time)")
    pins = "-c", "requirements.txt"
    pip("install", "-q", "--upgrade", *pins, "setuptools", "wheel")
    # --upgrade brings an older environment up to the pins, also where the range already held
    pip("install", "-q", "--upgrade", *pins, "--no-build-isolation", "-e", ".[dev]")
    # A CUDA build of torch brings the Triton it was made for; a CPU build brings none.
    if sys.platform.startswith("linux") and not has_module("triton"): pip("install", "-q", TRITON)
    libibverbs()
    pip("check")
    STAMP.write_text(stamp_text(), encoding="utf-8")
    say("ready")

if __name__ == "__main__": main()
