#!/usr/bin/env bash
# Installs the system packages that some tests look for (a browser, a database, a scheduler, a sandbox), where we may; without them those
# tests skip.
set -uo pipefail
packages=()
command -v chromium > /dev/null || packages+=(chromium)
compgen -G "/usr/lib/postgresql/*/bin/pg_ctl" > /dev/null || command -v pg_ctl > /dev/null || packages+=(postgresql)
command -v slurmctld > /dev/null || packages+=(slurm-wlm munge)
command -v bwrap > /dev/null || packages+=(bubblewrap)
[ ${#packages[@]} -eq 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "not installed, so some tests will skip: ${packages[*]}" >&2
  exit 0
fi
apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" > /dev/null
exit 0
