"""The layout of the wheel: `stemma` is its only top-level name, and the application's packages are in
`stemma/application`, which `stemma.home` puts on the path of imports of processes that use them.

The build calls it (`tool.setuptools.cmdclass` in pyproject.toml). An editable installation keeps the repository's
layout.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

# setuptools loads this file by its path, before anything of the project is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infra.project import BUILT_FROM, code_state

_OUTSIDE = ("requirements.lock", "configs")
"""Files that the application reads besides its packages: its lock, the limits of suites, the configs to start from."""


class BuildApplication(build_py):
    """Builds the packages, then moves all but `stemma` to where the wheel has them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        library = Path(self.build_lib)
        application = library / "stemma" / "application"
        shutil.rmtree(application, ignore_errors=True)
        application.mkdir(parents=True)
        for package in sorted(library.iterdir()):
            if package.name != "stemma":
                shutil.move(package, application / package.name)
        for name in _OUTSIDE:
            source = Path(name)
            if source.is_dir():
                shutil.copytree(source, application / name)
            else:
                shutil.copy(source, application / name)
        (application / BUILT_FROM).write_text(json.dumps(code_state()) + "\n")


class TopLevelNames(egg_info):
    """Writes the metadata; importlib.metadata takes the names in `top_level.txt` for the modules of a package."""

    def run(self) -> None:
        super().run()
        Path(self.egg_info, "top_level.txt").write_text("stemma\n")
