#!/usr/bin/env bash
# Slurm's Epilog: ends the job's sidecar on this node, and removes what a killed one could not: its entry in the service
# discovery and the job's records. Wanted with prolog.sh; useful too where jobs start their own sidecars.
#
# Always succeeds: Slurm drains a node whose epilog fails.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# A number that has been given to another process since is not ours to kill.
is_ours() { # pid
    [[ $1 =~ ^[1-9][0-9]*$ ]] && tr '\0' '\n' 2>/dev/null <"/proc/$1/environ" | grep -qx "SLURM_JOB_ID=$SLURM_JOB_ID" &&
        grep -q sidecar.py "/proc/$1/cmdline"
}

stop() { # pid
    local tries
    kill -TERM "$1" 2>/dev/null
    for ((tries = 0; tries < 120; tries++)); do
        is_ours "$1" || return
        sleep 0.1
    done
    kill -KILL -- "-$1" 2>/dev/null
}

main() {
    # shellcheck source=deploy/slurm/torchmem.conf
    source "$here/torchmem.conf" || return
    local pid=""
    [[ ! -r $run_dir/$SLURM_JOB_ID.pid ]] || pid=$(<"$run_dir/$SLURM_JOB_ID.pid")
    if is_ours "$pid"; then stop "$pid"; fi
    rm -f "$run_dir/$SLURM_JOB_ID.pid" "$run_dir/$SLURM_JOB_ID.log"
    rm -f "$sd_dir/$SLURM_CLUSTER_NAME-$SLURM_JOB_ID-$SLURMD_NODENAME.json"
    rm -rf "$(records_dir "$SLURM_JOB_UID" "$SLURM_JOB_ID")"
}

main
exit 0
