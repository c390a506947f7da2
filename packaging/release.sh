#!/bin/sh
# Builds what this system can of a release, and all that goes with it:
# packaging/release.sh [--out FOLDER] [--python PREFIX] [--twice]; see packaging/README.md.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python3}" "$here/making/release.py" "$@"
