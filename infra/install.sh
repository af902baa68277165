#!/usr/bin/env bash
# Makes .venv and installs exactly requirements.lock into it, every file checked against its hash.
#   infra/install.sh           install
#   infra/install.sh packages  install what the lock names, without this project: for the layers of an image
#   infra/install.sh lock      write requirements.lock anew from pyproject.toml
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = lock ]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  cp pyproject.toml "$folder"
  (cd "$folder" && "$OLDPWD/.venv/bin/uv" lock --quiet --upgrade)
  .venv/bin/uv export --quiet --project "$folder" --extra dev --no-emit-project --no-header --format requirements-txt |
    sed -e "s/ ; sys_platform == 'linux' / /" -e "s/ and sys_platform == 'linux'//" > requirements.lock
  exit
fi

python=
for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2> /dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "error: Python 3.11, 3.12, 3.13 or 3.14 was expected on the PATH; python3 is $(python3 --version 2>&1 || echo missing)" >&2
  exit 1
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
# uv installs many times faster than pip; its own version and hashes are in the lock like everything else.
if ! .venv/bin/uv --version > /dev/null 2>&1; then
  bootstrap=$(mktemp)
  trap 'rm -f "$bootstrap"' EXIT
  awk '/^uv==/ {on = 1} on {print} on && !/\\$/ {exit}' requirements.lock > "$bootstrap"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r "$bootstrap"
fi
echo "installing $(grep -c '^[a-zA-Z0-9]' requirements.lock) pinned packages into .venv" >&2
export UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
# Of one file; uv's minute is not enough where a machine is short of memory or processors.
export UV_COMPILE_BYTECODE_TIMEOUT="${UV_COMPILE_BYTECODE_TIMEOUT:-900}"
# The lock is complete, so nothing is resolved again: a second resolution would meet the bounds in the metadata of packages
# that pyproject.toml widens.
if ! .venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python --no-deps --require-hashes -r requirements.lock; then
  # uv does not read pip's settings: behind a mirror that only pip knows, pip still works.
  echo "uv could not install; trying pip" >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
fi
[ "${1:-}" = packages ] && exit
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable . ||
  .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
