#!/bin/sh
# Starts the server on the repository in REPOSITORY: the models of a step first, the one that uses them last.
set -eu
# A container that starts again finds the shared memory of the one before, whose processes are gone.
rm -rf "${SHARED:-/dev/shm}"/*
for folder in "$REPOSITORY"/*/; do
  name=$(basename "$folder")
  [ "$name" = generate ] || set -- "$@" "--load-model=$name"
done
exec tritonserver "--model-repository=$REPOSITORY" --model-control-mode=explicit --disable-auto-complete-config \
  --http-port=8000 --grpc-port=8001 --metrics-port=8002 "$@" --load-model=generate
