#!/usr/bin/env bash
# Unpacks the real Prometheus and promtool from the distribution's packages into .tools/usr/bin.
# Needs neither root nor an installation: the package is downloaded, its signature chain checked by apt, and unpacked.
# A second run finds them there and does nothing; an interrupted one leaves nothing that a later one would trust.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tools="$root/.tools"
prometheus="$tools/usr/bin/prometheus"
promtool="$tools/usr/bin/promtool"

fail() {
    echo "tools: $1" >&2
    exit 1
}

version() {
    "$prometheus" --version 2>&1 | awk 'NR == 1 { print $3 }'
}

if [[ -x $prometheus && -x $promtool ]]; then
    echo "tools: Prometheus $(version) is in .tools/usr/bin"
    exit 0
fi

for program in apt-get dpkg; do
    command -v "$program" >/dev/null ||
        fail "$program is missing: unpacking needs Debian or a relative of it; elsewhere put prometheus and promtool on PATH"
done

mkdir -p "$tools"
work=$(mktemp -d "$tools/partial.XXXXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/packages" "$work/unpacked"
: >"$work/log"

# The machine's own package lists first; where they are missing or out of date, fresh ones in a private folder, so that
# neither root nor a change to the machine is needed.
private=(-o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/archives" -o Debug::NoLocking=true)
sandbox=()
[[ $(id -u) -ne 0 ]] || sandbox=(-o APT::Sandbox::User=root)

download() {
    (cd "$work/packages" && apt-get -q "${sandbox[@]}" "$@" download prometheus) >>"$work/log" 2>&1
}

if ! download; then
    echo "tools: fetching package lists into a private folder"
    { apt-get -q "${sandbox[@]}" "${private[@]}" update >>"$work/log" 2>&1 && download "${private[@]}"; } ||
        fail "the package prometheus could not be downloaded (offline?): $(grep '^[EW]:' "$work/log" | tail -n 1)"
fi

dpkg -x "$work"/packages/prometheus_*.deb "$work/unpacked"
rm -rf "${tools:?}/usr"
mv "$work/unpacked/usr" "$tools/usr"
[[ -x $prometheus && -x $promtool ]] || fail "the distribution's package holds no prometheus and promtool: $tools/usr/bin"
echo "tools: Prometheus $(version) and promtool unpacked into .tools/usr/bin"
