"""The flagged cells and tests, with the interpreter that runs this file

No network, no `.venv`, nothing written outside the checkout. What the interpreter lacks comes from
the wheels in build/wheels (`make gpu-pack`). `--save` keeps the outputs in the notebooks.
"""
import json, os, re, shutil, subprocess, sys, zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT/"build"/"gpu"
FLAGGED = re.compile(r"^#\|\s*cuda\b", re.M)
MISSING = ("make gpu: {} is missing; run `make gpu-pack` where there is a network, "
           "and bring build/wheels along")


def older(have: str, want: str) -> bool:
    "Whether a version is older than another, by its numbers"
    number = lambda v: [int(x) for x in re.findall(r"\d+", v)][:4]
    return number(have) < number(want)

def unpack(wheels: Path, into: Path) -> list[str]:
    "Put the wheels that this interpreter lacks, or has older, where PYTHONPATH can find them"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    taken = []
    for wheel in sorted(wheels.glob("*-none-*.whl")):
        name, version = wheel.name.split("-")[:2]
        try: have = metadata.version(name)
        except metadata.PackageNotFoundError: have = None
        if have and not older(have, version): continue
        with zipfile.ZipFile(wheel) as z: z.extractall(into)
        taken.append(f"{name}-{version}")
    return taken

def environment(lib: Path) -> dict[str, str]:
    "Caches, homes and temporary files, all below build/gpu"
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    home, tmp = WORK/"home", WORK/"tmp"
    for d in (home, tmp): d.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), str(lib), *filter(None, [env.get("PYTHONPATH")])]
    return env | {"HOME": str(home), "TMPDIR": str(tmp), "PYTHONPATH": os.pathsep.join(paths),
                  "XDG_CACHE_HOME": str(home/".cache"), "XDG_CONFIG_HOME": str(home/".config"),
                  "IPYTHONDIR": str(home/".ipython"), "MPLCONFIGDIR": str(home/".mpl"),
                  "TRITON_CACHE_DIR": str(home/".triton"), "CUDA_CACHE_PATH": str(home/".nv"),
                  "TORCHINDUCTOR_CACHE_DIR": str(home/".inductor"),
                  "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1",
                  "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}

def cells_of(path: Path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [c for c in cells if c["cell_type"] == "code"]

def flagged() -> list[str]:
    "Notebooks that have a cell for the GPU"
    return [p.name for p in sorted((ROOT/"nbs").glob("*.ipynb"))
            if any(FLAGGED.search("".join(c["source"])) for c in cells_of(p))]

def main() -> None:
    save = "--save" in sys.argv
    taken = unpack(ROOT/"build"/"wheels", WORK/"lib")
    env = environment(WORK/"lib")
    def call(*args: str) -> int:
        cmd = [sys.executable, *args]
        return subprocess.run(cmd, cwd=ROOT, env=env, stdin=subprocess.DEVNULL).returncode
    for module in ("torch", "numpy", "pytest", "hypothesis", "nbdev.test"):
        if call("-c", f"import {module}"): sys.exit(MISSING.format(module))
    if call("-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"):
        sys.exit("make gpu: this torch sees no CUDA device; name another: make gpu PYTHON=...")
    if taken: print("make gpu: from build/wheels:", *taken, flush=True)
    books, failed = flagged(), []
    for name in books:    # one after another: notebooks would share the GPU
        print(f"make gpu: nbs/{name}", flush=True)
        run = ("from nbdev.test import nbdev_test as f; "
               f"f('nbs/{name}', flags='cuda', n_workers=0, save={save}, cell_timeout=1800)")
        if call("-c", run): failed.append(name)
    # `--save` leaves run times in the metadata, which nbformat refuses
    clean = "from nbdev.clean import nbdev_clean as f; f()"
    if save and books and call("-c", clean): failed.append("nbdev-clean")
    tests = call("-m", "pytest", "-p", "no:cacheprovider", "--cuda", "-m", "cuda", "tests")
    if tests not in (0, 5): failed.append("tests")    # 5: none is marked yet
    if failed: sys.exit(f"make gpu: failed: {', '.join(failed)}")
    print(f"make gpu: {len(books)} notebooks with flagged cells, and the tests marked cuda: passed")

if __name__ == "__main__": main()
