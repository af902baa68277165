"""The image's recipe without a container engine: each step of infra/Dockerfile is executed in a chroot of this machine.

The base image is this machine's /usr, with the Python of the tests at /usr/local. Two steps get stand-ins, since a test
has no network: `apt-get` simulates against the packages that are installed here, and where `infra/install.sh packages`
would download wheels it meets the environment that runs the tests.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from tests.support.pipelines import short_config
from tests.support.programs.command import REPOSITORY

DOCKERFILE = REPOSITORY / "infra" / "Dockerfile"
SYSTEM_FILES = (
    "alternatives",
    "apt",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "login.defs",
    "nsswitch.conf",
    "ssl",
)
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\nmail:x:8:\n",
    "etc/shadow": "root:*:19000:0:99999:7:::\n",
    "etc/gshadow": "root:*::\nmail:*::\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    "machine/apt-get": """#!/bin/sh
[ "$1" = update ] || exec /machine/real-apt-get --simulate --no-download "$@"
""",
    "machine/environment": """set -e
python3 -m venv --without-pip .venv
echo /machine/packages > "$(echo .venv/lib/python3*/site-packages)/machine.pth"
ln -s /machine/uv .venv/bin/uv
""",
    "machine/real-apt-get": "",
    "machine/uv": "",
}
FOLDERS = ("dev", "home", "machine/packages", "proc", "root", "usr", "var/lib/apt/lists", "var/lib/dpkg")
OFFLINE = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}
WITHOUT_EFFECT_HERE = ("FROM", "ARG", "VOLUME", "EXPOSE")


def namespace() -> list[str]:
    """The command that gives a program its own mounts, and users where root has not started it."""
    users = [] if os.geteuid() == 0 else ["--user", "--map-root-user", "--map-auto"]
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", *users]


@functools.cache
def obstacle() -> str:
    """The reason why this machine cannot execute the steps; empty where it can."""
    if not shutil.which("unshare") or not shutil.which("setpriv"):
        return "unshare and setpriv of util-linux are not installed"
    probe = "mount -t tmpfs none /mnt && setpriv --reuid 10001 --regid 10001 --clear-groups true"
    tried = subprocess.run([*namespace(), "sh", "-c", probe], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no namespace with mounts and the image's user: {tried.stderr.strip()}"
    release = dict(line.partition("=")[::2] for line in Path("/etc/os-release").read_text().splitlines())
    base = next(rest.partition("=")[2] for word, rest in steps() if word == "ARG")
    codename = release.get("VERSION_CODENAME", "another system")
    return "" if base.endswith(f"-{codename}") else f"the image begins with {base}, and this machine is {codename}"


def steps() -> Iterator[tuple[str, str]]:
    lines = (line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#"))
    for step in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = step.partition(" ")
        yield word, rest.strip()


def build_context(folder: Path) -> Path:
    """Return a folder with what `docker build` would send: this working tree without the files of .dockerignore."""
    context = folder / "context"
    subprocess.run(["git", "clone", "-q", "--no-checkout", "--depth", "1", REPOSITORY.as_uri(), context], check=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (REPOSITORY / name).exists():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, context / name)
    for name in (".venv/unwanted", ".stemma/unwanted", "cli/__pycache__/unwanted"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).touch()
    for pattern in (REPOSITORY / ".dockerignore").read_text().split():
        for path in context.glob(pattern):
            shutil.rmtree(path)
    return context


class Image:
    """A folder that becomes the image, a step at a time."""

    def __init__(self, root: Path, context: Path) -> None:
        self.root, self.context = root, context
        self.user, self.workdir = "root", "/"
        self.env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            **OFFLINE,
        }
        self.command: list[str] = []
        for name in (*FOLDERS, "etc/default", sys.base_prefix[1:]):
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "tmp").mkdir()
        (root / "tmp").chmod(0o1777)
        for name in ("bin", "sbin", "lib", "lib64"):
            if Path("/", name).is_symlink():
                (root / name).symlink_to(os.readlink(f"/{name}"))
        present = [Path("/etc", name) for name in SYSTEM_FILES if Path("/etc", name).exists()]
        subprocess.run(["cp", "--archive", *present, root / "etc"], check=True)
        for name, text in FILES.items():
            (root / name).write_text(text)
            (root / name).chmod(0o755)
        self.mounts = {
            "/usr": "/usr",
            "/dev": "/dev",
            "/var/lib/dpkg": "/var/lib/dpkg",
            "/usr/local": sys.base_prefix,
            sys.base_prefix: sys.base_prefix,  # a shared libpython is found by the folder that it was built for
            "/machine/packages": sysconfig.get_path("purelib"),
            "/machine/uv": os.path.realpath(Path(sys.executable).with_name("uv")),
            "/machine/real-apt-get": "/usr/bin/apt-get",
            "/usr/bin/apt-get": str(root / "machine" / "apt-get"),
        }

    def run(
        self, command: Sequence[str], volumes: Mapping[str, Path] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the image's user.

        Args:
            volumes: those of a container whose image is read-only; None for a step that builds the image.
        """
        account = next(row for row in self.accounts() if row[0] == self.user)
        root = shlex.quote(str(self.root))
        lines = [f"mount --bind {root} {root}", f"mount -t proc proc {root}/proc"]
        for target, source in {**self.mounts, **{name: str(path) for name, path in (volumes or {}).items()}}.items():
            lines.append(f"mount --rbind {shlex.quote(source)} {root}{shlex.quote(target)}")
            if target != "/dev" and target not in (volumes or {}):
                lines.append(f"mount -o remount,bind,ro {root}{target}")
        if volumes is not None:
            lines.append(f"mount -o remount,bind,ro {root}")
        drop = ["setpriv", "--reuid", account[2], "--regid", account[3], "--clear-groups"]
        if self.user != "root":
            drop += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        inside = [*drop, "/bin/sh", "-c", f'cd {shlex.quote(self.workdir)} && exec "$@"', "sh", *command]
        lines.append(f"exec chroot {root} {shlex.join(inside)}")
        return self.namespaced(" &&\n".join(lines), {**self.env, "HOME": account[5]})

    def namespaced(self, script: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [*namespace(), "sh", "-c", script]
        return subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    def accounts(self) -> list[list[str]]:
        return [line.split(":") for line in (self.root / "etc" / "passwd").read_text().splitlines()]

    def build(self, word: str, rest: str) -> None:
        """Execute one step of the recipe."""
        if word == "RUN":
            if rest == "infra/install.sh packages":
                self.succeed(self.run(["/bin/sh", "/machine/environment"]), "the environment of the tests")
            self.succeed(self.run(["/bin/sh", "-c", rest]), f"RUN {rest}")
        elif word == "COPY":
            self.copy(rest.split())
        elif word == "USER":
            self.user = rest
        elif word == "WORKDIR":
            self.workdir = rest
            (self.root / rest[1:]).mkdir(parents=True, exist_ok=True)
        elif word == "ENV":
            for pair in shlex.split(rest):
                name, _, value = pair.partition("=")
                self.env[name] = re.sub(r"\$(\w+)", lambda match: self.env[match[1]], value)
        elif word == "CMD":
            self.command = yaml.safe_load(rest)
        else:
            assert word in WITHOUT_EFFECT_HERE, f"{word} is a step that this test cannot execute"

    def copy(self, words: list[str]) -> None:
        option, *sources, target = words
        user, group = option.removeprefix("--chown=").split(":")
        assert user == group, "the groups of users have their names"
        uid, gid = next(row[2:4] for row in self.accounts() if row[0] == user)
        to = self.root / self.workdir[1:] / target
        for name in sources:
            source = self.context / name
            if source.is_dir():
                pack = ["tar", "-C", source, "-c", "--numeric-owner", f"--owner={uid}", f"--group={gid}", "."]
                unpack = ["tar", "-C", to, "-x", "--preserve-permissions", "--numeric-owner", "--no-overwrite-dir"]
                script = f"{shlex.join(map(str, pack))} | {shlex.join(map(str, unpack))}"
            else:
                path = to / source.name if target.endswith("/") else to
                mode = oct(source.stat().st_mode & 0o777)[2:]
                script = shlex.join(map(str, ["install", "-D", "-o", uid, "-g", gid, "-m", mode, source, path]))
            self.succeed(self.namespaced(script), f"COPY {name}")

    def succeed(self, done: subprocess.CompletedProcess[str], step: str) -> None:
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if obstacle():
        pytest.skip(obstacle())
    folder = tmp_path_factory.mktemp("image")
    image = Image(folder / "root", build_context(folder))
    for word, rest in steps():
        image.build(word, rest)
    yield image
    image.namespaced(shlex.join(["rm", "-rf", str(folder)]))


@pytest.mark.long
def test_each_step_succeeds_and_leaves_a_command_for_an_ordinary_user(image: Image, tmp_path: Path) -> None:
    volumes = volumes_of(image, tmp_path)

    shown = image.run(image.command, volumes)
    program = "import os, cli, torch; print(cli.__file__, os.getuid(), os.access('/app', os.W_OK))"
    inside = image.run(["python", "-c", program], volumes)

    assert shown.returncode == 0 and "Usage: stemma" in shown.stdout, shown.stderr
    assert inside.stdout.split() == ["/app/cli/__init__.py", "10001", "False"], inside.stderr
    unwanted = list((image.root / "app").rglob("unwanted"))
    assert not unwanted, "what .dockerignore names is not sent"


@pytest.mark.long
def test_a_pipeline_runs_in_the_read_only_image(image: Image, tmp_path: Path) -> None:
    volumes = volumes_of(image, tmp_path)
    config = short_config(tmp_path / "home")
    config["ingest"]["read"][0]["paths"] = ["/home/stemma/text.jsonl"]
    (tmp_path / "home" / "pipeline.yaml").write_text(yaml.safe_dump(config))

    done = image.run(["stemma", "run", "/home/stemma/pipeline.yaml", "--json"], volumes)

    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["stages"]
    assert rows and {row["status"] for row in rows} == {"built"}
    assert all(row["path"].startswith("/store/") for row in rows)


def volumes_of(image: Image, folder: Path) -> dict[str, Path]:
    """Those of the compose file: the store, and anonymous volumes, which begin as a copy of the image's folder."""
    volumes = {"/store": folder / "store", "/tmp": folder / "tmp", "/home/stemma": folder / "home"}
    for path in volumes.values():
        path.mkdir()
        image.namespaced(shlex.join(["chown", "10001:10001", str(path)]))
    return volumes
