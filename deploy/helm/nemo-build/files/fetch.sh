#!/bin/sh
# Fetches an engine: KIND is oci or object, SOURCE where it is, SHA256 the digest of an object.
# A reference of a registry has its digest in it, which oras checks.
set -eu
work=${WORK:-/engine}
rm -rf "$work/engine" "$work/engine.tar"
case "$KIND" in
oci)
  oras pull --output "$work" "$SOURCE"
  ;;
object)
  rclone copyto "$SOURCE" "$work/engine.tar"
  echo "$SHA256  $work/engine.tar" | sha256sum -c -
  ;;
esac
mkdir "$work/engine"
tar -xf "$work/engine.tar" -C "$work/engine"
rm "$work/engine.tar"
