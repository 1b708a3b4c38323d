#!/usr/bin/env bash
# Unpacks the real servers that the tests talk to, and the browser that pages are tested and drawn in, from the
# distribution's packages, and links them into .tools/usr/bin.
# Needs neither root nor an installation: each package is downloaded, its signature chain checked by apt, and unpacked
# into .tools/packages. A second run finds them there and does nothing; an interrupted one leaves nothing that a later
# one would trust; two at once wait for each other.
set -euo pipefail

# package, release of Debian that has it in a version which will do ("own": this machine's; "own+PACKAGE": together
# with that one and with every package that the two need and this machine lacks), programs
needed=(
    "prometheus own prometheus promtool"
    "victoria-metrics trixie victoria-metrics"
    "prometheus-alertmanager trixie prometheus-alertmanager amtool"
    "docker-compose trixie docker-compose"
    "chromium-headless-shell own+chromium-common chromium-headless-shell"
    "slurmd own+slurmctld slurmd-wlm slurmctld-wlm slurmstepd-wlm munged srun sbatch scancel scontrol squeue sinfo"
    "buildah own+debootstrap buildah debootstrap"
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

download() { # package, another to bring with all that the two need ("" for none of this), options
    local folder="$work/debs"
    rm -rf "$folder"
    mkdir -p "$folder/partial"
    if [[ -z $2 ]]; then
        (cd "$folder" && apt "${@:3}" download "$1")
    else
        apt "${@:3}" -o "Dir::Cache::archives=$folder" -o Debug::NoLocking=true -y --no-install-recommends --reinstall \
            --download-only install "$1" "$2"
    fi
}

fetch() { # package, release
    local package=$1 release=${2%%+*} with private
    with=${2:${#release}+1}
    [[ $release != "$(own_release)" ]] || release=own
    # This release's from the machine's own package lists, where these are there and up to date.
    if [[ $release == own ]] && download "$package" "$with"; then
        return
    fi
    say "fetching package lists into a private folder, for $package"
    private_options "$release"
    apt "${private[@]}" update || true # one of several sources may fail: whether the package came is what counts
    download "$package" "$with" "${private[@]}" ||
        fail "the package $package could not be downloaded (offline?): $(grep '^[EW]:' "$work/log" | tail -n 1)"
}

# Where a program lies in what was unpacked: itself, rather than a script that looks for it where it is not.
executable() { # folder, program
    (cd "$1" && find usr/lib usr/sbin usr/bin -maxdepth 2 -name "$2" -xtype f -perm -u+x 2>/dev/null | head -n 1) || true
}

# A program that came with its libraries and fonts finds these, then those of the machine.
wrap() { # package, program
    local folder="$tools/packages/$1" found
    found=$(executable "$folder" "$2")
    cat >"$folder/fonts.conf" <<END
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
    <dir prefix="relative">usr/share/fonts</dir>
    <dir>/usr/share/fonts</dir>
    <cachedir prefix="xdg">fontconfig</cachedir>
</fontconfig>
END
    cat >"$work/wrapper" <<END
#!/bin/sh
folder=\$(cd "\$(dirname "\$0")/../../packages/$1" && pwd)
for libraries in "\$folder"/lib/*-linux-gnu "\$folder"/usr/lib/*-linux-gnu "\$folder"/usr/lib/*-linux-gnu/pulseaudio \\
    "\$folder"/usr/lib/*-linux-gnu/slurm-wlm; do
    [ -d "\$libraries" ] || continue
    LD_LIBRARY_PATH=\$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
done
export LD_LIBRARY_PATH FONTCONFIG_FILE="\$folder/fonts.conf"
exec "\$folder/$found" "\$@"
END
    chmod +x "$work/wrapper"
    mv "$work/wrapper" "$bin/$2"
}

unpack() { # package, release, programs
    local package=$1 program deb
    for deb in "$work/debs"/*.deb; do
        dpkg -x "$deb" "$work/unpacked"
    done
    for program in "${@:3}"; do
        [[ -n $(executable "$work/unpacked" "$program") ]] || fail "the distribution's package $package holds no $program"
    done
    rm -rf "${tools:?}/packages/$package"
    mv "$work/unpacked" "$tools/packages/$package"
    for program in "${@:3}"; do
        if [[ $2 == *+* ]]; then
            wrap "$package" "$program"
        else
            ln -sfn "../../packages/$package/usr/bin/$program" "$bin/$program"
        fi
    done
    say "${*:3}: unpacked from $package $(dpkg-deb -f "$work/debs/$package"_*.deb Version) into .tools/usr/bin"
}

for entry in "${missing[@]}"; do
    read -r package release names <<<"$entry"
    read -ra names <<<"$names"
    is_there "${names[@]}" && continue # another run made them while this one waited
    fetch "$package" "$release"
    unpack "$package" "$release" "${names[@]}"
done
