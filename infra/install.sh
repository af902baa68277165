#!/usr/bin/env bash
# Makes an environment and installs exactly requirements.lock into it, every file checked against its hash.
#   infra/install.sh            install into .venv
#   infra/install.sh packages   install what the lock names, without this project: for the layers of an image
#   infra/install.sh lock       write requirements.lock anew from pyproject.toml
#   infra/install.sh candidate  write .venv-candidate/requirements.lock so, and install it into .venv-candidate
# With STEMMA_CPU_INDEX=URL torch and torchvision are the builds for CPUs of that index, of the lock's versions, and the
# libraries of CUDA are left out. The hashes of these two are not in the lock: give an index that you trust.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.venv lock=requirements.lock

write_lock() { # to the file $1
  local folder
  folder=$(mktemp -d)
  cp pyproject.toml "$folder"
  (cd "$folder" && "$OLDPWD/.venv/bin/uv" lock --quiet --upgrade)
  .venv/bin/uv export --quiet --project "$folder" --extra dev --no-emit-project --no-header --format requirements-txt |
    sed -e "s/ ; sys_platform == 'linux' / /" -e "s/ and sys_platform == 'linux'//" > "$folder/requirements.lock"
  mv "$folder/requirements.lock" "$1"
  rm -rf "$folder"
}

case "${1:-}" in
lock)
  write_lock requirements.lock
  exit
  ;;
candidate)
  environment=.venv-candidate lock=.venv-candidate/requirements.lock
  .venv/bin/uv venv --quiet --allow-existing --python .venv/bin/python "$environment"
  write_lock "$lock"
  ;;
esac

if [ ! -x "$environment/bin/python" ]; then
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
  "$python" -m venv "$environment"
fi
python="$environment/bin/python"

# uv installs many times faster than pip; its own version and hashes are in the lock like everything else.
if ! .venv/bin/uv --version > /dev/null 2>&1; then
  bootstrap=$(mktemp)
  trap 'rm -f "$bootstrap"' EXIT
  awk '/^uv==/ {on = 1} on {print} on && !/\\$/ {exit}' "$lock" > "$bootstrap"
  "$python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$bootstrap"
fi

wanted=$lock
if [ -n "${STEMMA_CPU_INDEX:-}" ]; then
  wanted="$environment/without-cuda.lock"
  awk '/^[A-Za-z0-9]/ {on = $0 !~ /^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==/} on' "$lock" > "$wanted"
  mapfile -t builds < <(sed -nE 's/^((torch|torchvision)==[^ +]+).*/\1/p' "$lock")
fi
# Libraries of another CUDA, from an earlier lock, would be loaded beside those of this one.
mapfile -t stale < <(.venv/bin/uv pip list --format freeze --python "$python" 2> /dev/null | sed -nE 's/^((nvidia|cuda)-[^=]+)==.*/\1/p' |
  while read -r name; do grep -q "^$name==" "$wanted" || echo "$name"; done)
if [ "${#stale[@]}" -gt 0 ]; then
  .venv/bin/uv pip uninstall --quiet --python "$python" "${stale[@]}"
fi
echo "installing $(grep -c '^[a-zA-Z0-9]' "$lock") pinned packages into $environment${builds:+, torch without CUDA}" >&2
export UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
# Of one file; uv's minute is not enough where a machine is short of memory or processors.
export UV_COMPILE_BYTECODE_TIMEOUT="${UV_COMPILE_BYTECODE_TIMEOUT:-900}"
# The lock is complete, so nothing is resolved again: a second resolution would meet the bounds in the metadata of packages
# that pyproject.toml widens.
if ! .venv/bin/uv pip install --quiet --compile-bytecode --python "$python" --no-deps --require-hashes -r "$wanted"; then
  # uv does not read pip's settings: behind a mirror that only pip knows, pip still works.
  echo "uv could not install; trying pip" >&2
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r "$wanted"
fi
if [ -n "${builds:-}" ]; then
  .venv/bin/uv pip install --quiet --compile-bytecode --python "$python" --no-deps --default-index "$STEMMA_CPU_INDEX" "${builds[@]}"
  if ! "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
    echo "error: a build of torch for CPUs was expected in the index that STEMMA_CPU_INDEX names, found one for CUDA" >&2
    exit 1
  fi
fi
[ "${1:-}" = packages ] && exit
.venv/bin/uv pip install --quiet --python "$python" --no-deps --no-build-isolation --editable . ||
  "$python" -m pip install --quiet --no-deps --no-build-isolation --editable .
