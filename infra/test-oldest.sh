#!/usr/bin/env bash
# Makes .venv-oldest, which differs from requirements.lock in the versions of infra/oldest.txt and what these require, and runs
# the training tests there: machines with GPUs bring their own torch. Not part of CI; takes about 8 GB of disk.
#   infra/test-oldest.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv-oldest/bin/python
[ -x "$python" ] || .venv/bin/uv venv --quiet --python .venv/bin/python .venv-oldest
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
sed -nE -e '/^(torch|torchvision|torchao|transformers|triton|nvidia-[a-z0-9-]*|cuda-[a-z]*|setuptools)==/d' -e 's/^([A-Za-z0-9].*[^ ]) *\\$/\1/p' requirements.lock > "$pins"
# uv takes the wider bounds of Composer and the like from pyproject.toml.
.venv/bin/uv pip install --quiet --python "$python" --constraint infra/oldest.txt --constraint "$pins" --editable '.[dev]'
.venv/bin/uv pip list --quiet --python "$python" | grep -E '^(torch|torchvision|torchao|transformers|mosaicml|mosaicml-streaming|numpy) '
"$python" -m pytest -m "not long" "${@:-tests/training}"
