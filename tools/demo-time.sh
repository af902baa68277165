#!/usr/bin/env bash
# Prints how long the quickstart took on processors of this kind: 298 to 632 s in 25 runs with bf16, 1,936 s with AVX2 alone
# (benchmarks/log/quickstart.md). Nothing is measured: on a busy machine a measurement is further off than these.
set -euo pipefail
cpuinfo=${STEMMA_CPUINFO:-/proc/cpuinfo}
cores=$(nproc)

if grep -qwE 'amx_bf16|avx512_bf16' "$cpuinfo" 2> /dev/null; then
  took="5 to 11 minutes with two cores and bf16, which this processor has"
elif grep -qw avx2 "$cpuinfo" 2> /dev/null; then
  took="about half an hour with two cores of AVX2 and without bf16, as here"
fi
echo "   from docstrings to a report${took:+: it has taken $took}"
if [ -n "${took:-}" ] && [ "$cores" -lt 2 ]; then
  echo "   with one core, as here, it takes longer"
fi
echo "   it reuses what is built already, and each stage shows its time left once it has a pace"
