#!/usr/bin/env bash
# Makes .venv-newer with the newest torch and transformers, Composer without its pins, and runs the training tests there
# with the native loop: machines with GPUs may bring such versions. Not part of CI; takes about 6 GB of disk.
#   infra/test-newer.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv-newer/bin/python
[ -x "$python" ] || .venv/bin/uv venv --quiet --python .venv/bin/python .venv-newer
.venv/bin/uv pip install --quiet --python "$python" --override infra/newer.txt --editable . \
  'pytest>=8.3' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'hypothesis>=6.130' 'trl>=1.16' 'peft>=0.21' 'moto[server]>=5.1' \
  'playwright>=1.50'
.venv/bin/uv pip list --quiet --python "$python" | grep -E '^(torch|torchvision|transformers|mosaicml|mosaicml-streaming|numpy) '
STEMMA_TEST_TRAINER="${STEMMA_TEST_TRAINER:-native}" "$python" -m pytest -m "not long" "${@:-tests/training}"
