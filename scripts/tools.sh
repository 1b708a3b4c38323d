#!/usr/bin/env bash
# Unpacks the real servers that the tests talk to from the distribution's packages, and links them into .tools/usr/bin.
# Needs neither root nor an installation: each package is downloaded, its signature chain checked by apt, and unpacked
# into .tools/packages. A second run finds them there and does nothing; an interrupted one leaves nothing that a later
# one would trust; two at once wait for each other.
set -euo pipefail

# package, release of Debian that has it in a version which will do ("own": this machine's), programs
needed=(
    "prometheus own prometheus promtool"
    "victoria-metrics trixie victoria-metrics"
    "prometheus-alertmanager trixie prometheus-alertmanager"
)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tools="$root/.tools"
bin="$tools/usr/bin"

say() {
    echo "tools: $1"
}

fail() {
    say "$1" >&2
    exit 1
}

is_there() { # programs
    local program
    for program in "$@"; do
        [[ -x $bin/$program ]] || return 1
    done
}

missing=()
programs=()
for entry in "${needed[@]}"; do
    read -r _ _ names <<<"$entry"
    read -ra names <<<"$names"
    programs+=("${names[@]}")
    is_there "${names[@]}" || missing+=("$entry")
done
if [[ ${#missing[@]} -eq 0 ]]; then
    say "${programs[*]}: in .tools/usr/bin"
    exit 0
fi

for program in apt-get dpkg flock; do
    command -v "$program" >/dev/null ||
        fail "$program is missing: unpacking needs Debian or a relative of it; elsewhere put ${programs[*]} on PATH"
done

mkdir -p "$bin" "$tools/packages"
exec 9>"$tools/lock"
flock 9
rm -rf "$tools"/partial.* # of a run that was killed: whoever lives holds the lock
work=$(mktemp -d "$tools/partial.XXXXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
: >"$work/log"
sandbox=()
[[ $(id -u) -ne 0 ]] || sandbox=(-o APT::Sandbox::User=root)

own_release() {
    (. /etc/os-release && echo "${VERSION_CODENAME:-unknown}")
}

# The machine's own package sources, the signatures that they demand included, with the name of its release changed.
derive_sources() { # folder, release
    local own file
    own=$(own_release)
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [[ ! -r $file ]] || grep -E "^deb .*\b$own\b" "$file" || true
    done | sed "s/\b$own\b/$2/g" >"$1/machine.list"
    for file in /etc/apt/sources.list.d/*.sources; do
        [[ ! -r $file ]] || awk -v own="$own" 'BEGIN { RS = ""; ORS = "\n\n" } $0 ~ own' "$file"
    done | sed "s/\b$own\b/$2/g" >"$1/machine.sources"
    [[ -s $1/machine.list || -s $1/machine.sources ]] ||
        fail "none of this machine's package sources names its release, $own: no other release's can be derived from them"
}

# Options that keep everything of apt's in a private folder, so that neither root nor a change to the machine is needed.
private_options() { # release; sets `private`
    local folder="$work/$1"
    mkdir -p "$folder/lists/partial" "$folder/archives/partial" "$folder/sources"
    private=(-o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/archives" -o Debug::NoLocking=true)
    private+=(-o Acquire::Languages=none)
    [[ $1 != own ]] || return 0
    derive_sources "$folder/sources" "$1"
    private+=(-o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$folder/sources")
}

apt() {
    apt-get -q "${sandbox[@]}" "$@" >>"$work/log" 2>&1
}

download() { # package, options
    (cd "$work" && apt "${@:2}" download "$1")
}

fetch() { # package, release
    local release=$2 private
    [[ $release != "$(own_release)" ]] || release=own
    # This release's from the machine's own package lists, where these are there and up to date.
    if [[ $release == own ]] && download "$1"; then
        return
    fi
    say "fetching package lists into a private folder, for $1"
    private_options "$release"
    apt "${private[@]}" update || true # one of several sources may fail: whether the package came is what counts
    download "$1" "${private[@]}" ||
        fail "the package $1 could not be downloaded (offline?): $(grep '^[EW]:' "$work/log" | tail -n 1)"
}

unpack() { # package, programs
    local package=$1 program
    dpkg -x "$work/$package"_*.deb "$work/unpacked"
    for program in "${@:2}"; do
        [[ -x $work/unpacked/usr/bin/$program ]] || fail "the distribution's package $package holds no $program"
    done
    rm -rf "${tools:?}/packages/$package"
    mv "$work/unpacked" "$tools/packages/$package"
    for program in "${@:2}"; do
        ln -sfn "../../packages/$package/usr/bin/$program" "$bin/$program"
    done
    say "${*:2}: unpacked from $package $(dpkg-deb -f "$work/$package"_*.deb Version) into .tools/usr/bin"
}

for entry in "${missing[@]}"; do
    read -r package release names <<<"$entry"
    read -ra names <<<"$names"
    is_there "${names[@]}" && continue # another run made them while this one waited
    fetch "$package" "$release"
    unpack "$package" "${names[@]}"
done
