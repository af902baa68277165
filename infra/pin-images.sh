#!/usr/bin/env bash
# Prints the images of infra/compose.env.example by digest, as lines for .env: what a tag names can be changed by others,
# what a digest names cannot. Asks the registries, and needs docker with buildx. Say it again for newer images.
#
#   infra/pin-images.sh >> .env
set -euo pipefail
cd "$(dirname "$0")"
pinned=()
while IFS='=' read -r name image; do
  digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$image")
  if ! [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]]; then
    echo "error: $image: expected a digest sha256:…, got $digest" >&2
    exit 1
  fi
  pinned+=("$name=$image@$digest")
done < <(grep -E '^[A-Z0-9]+_IMAGE=' compose.env.example)
printf '%s\n' "${pinned[@]}"
