#!/usr/bin/env bash
# Installs what each folder's package-lock.json names beside that file: scripts/npm.sh FOLDER...
# The lock files hold digests and no addresses. A finished installation costs one comparison; one that was interrupted
# is made anew; two at once wait for each other. Where npm is missing it says so: what needs it is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v npm >/dev/null; then
    echo "tools: npm is missing: pictures of dashboards cannot be drawn, nor objects of operators checked"
    exit 0
fi
for folder in "$@"; do
    done=node_modules/.installed
    (
        cd "$folder"
        exec 9<package-lock.json
        flock 9
        if cmp -s package-lock.json "$done"; then
            echo "tools: $folder: installed"
        else
            npm ci --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null
            mkdir -p node_modules
            cp package-lock.json "$done"
            echo "tools: $folder: installed now"
        fi
    )
done
