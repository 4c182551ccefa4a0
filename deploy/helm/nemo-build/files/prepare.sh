#!/bin/sh
# Checks the engine in ENGINE and makes a model repository of it; the arguments are options of `nemo-build triton`.
set -eu
if [ -n "${MANIFEST_SHA256:-}" ]; then
  echo "$MANIFEST_SHA256  $ENGINE/engine.json" | sha256sum -c -
fi
if [ "$VERIFY" = true ]; then
  "$NEMO_BUILD" inspect --verify "$ENGINE"
fi
"$NEMO_BUILD" triton "$ENGINE" -o "$REPOSITORY" --reference --force "$@"
