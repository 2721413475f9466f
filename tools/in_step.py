"""Whether `cpkv/` is what the notebooks export, and the notebooks are clean

Exports a copy in a temporary folder and compares, so neither git nor work in progress is touched.
"""
import difflib, os, shutil, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = "nbs", "pyproject.toml", "settings.ini"


def exported(root: Path, into: Path) -> Path:
    "A copy of the project below `into`, its library exported anew from its cleaned notebooks"
    copy = into/"copy"
    copy.mkdir()
    for name in COPIED:
        src, dst = root/name, copy/name
        if src.is_dir():
            shutil.copytree(src, dst, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
        else: shutil.copy(src, dst)
    # only what nbdev does not make itself: the version, and files that are not modules
    (copy/"cpkv").mkdir()
    shutil.copy(root/"cpkv"/"__init__.py", copy/"cpkv")
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    for call in ("nbdev.clean import nbdev_clean", "nbdev.doclinks import nbdev_export"):
        code = f"from {call} as f; f()"
        subprocess.run([sys.executable, "-c", code], cwd=copy, env=env, check=True)
    return copy

def texts(folder: Path, pattern: str) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8")
            for p in sorted(folder.rglob(pattern))
            if not {"__pycache__", ".ipynb_checkpoints"} & set(p.parts)}

def differences(root: Path) -> list[str]:
    "One text for each file that is not in step"
    found = []
    with tempfile.TemporaryDirectory() as tmp:
        copy = exported(root, Path(tmp).resolve())
        for folder, pattern, how in (("nbs", "*.ipynb", "run nbdev-clean"),
                                     ("nbs", "llms.txt", "run nbdev-export"),
                                     ("cpkv", "*.py", "run nbdev-export")):
            ours, fresh = texts(root/folder, pattern), texts(copy/folder, pattern)
            for name in sorted(ours.keys() | fresh.keys()):
                a, b = ours.get(name), fresh.get(name)
                if a == b: continue
                if b is None: found.append(f"{folder}/{name}: no notebook exports it; delete it")
                elif a is None: found.append(f"{folder}/{name}: missing; {how}")
                else: found.append(f"{folder}/{name}: {how}\n" + "\n".join(
                    [*difflib.unified_diff(a.splitlines(), b.splitlines(), "here", "fresh",
                                           lineterm="", n=1)][:12]))
    return found

def main() -> None:
    found = differences(ROOT)
    print("\n".join(found) or "in step: cpkv/ is what the notebooks export, and they are clean")
    sys.exit(bool(found))

if __name__ == "__main__": main()
