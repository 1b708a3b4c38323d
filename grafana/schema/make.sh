#!/usr/bin/env bash
# Makes dashboard.schema.json, beside this file, from dashboard.ts and the types of @grafana/schema: `make schema`.
# Its $comment holds the digest of what it was made from, by which a test sees whether it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

../../scripts/npm.sh grafana/schema
node_modules/.bin/tsc --project tsconfig.json
made=$(node_modules/.bin/ts-json-schema-generator --tsconfig tsconfig.json --path dashboard.ts --type Dashboard \
    --expose none --no-top-ref --jsDoc none --minify)
digest=$(cat dashboard.ts package-lock.json tsconfig.json | sha256sum | cut -d' ' -f1)
# shellcheck disable=SC2016  # $comment is a keyword of JSON schema
printf '{"$comment":"made by grafana/schema/make.sh from %s",%s\n' "$digest" "${made#\{}" >dashboard.schema.json
