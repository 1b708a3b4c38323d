#!/usr/bin/env bash
# Slurm's Prolog (with PrologFlags=Alloc, so that it runs when a job gets its nodes): starts a sidecar for the job on this
# node. sidecar.py stays root, so that only root writes what Prometheus reads; the exporter runs as the job's user.
#
# Always succeeds, and does not wait: a sidecar that cannot start must neither cost the job nor drain the node.
# Does not suit job_container/tmpfs, which hides the job's /dev/shm from it: there let the job start its own sidecar.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

main() {
    # shellcheck source=deploy/slurm/torchmem.conf
    source "$here/torchmem.conf" || return
    local records
    records=$(records_dir "$SLURM_JOB_UID" "$SLURM_JOB_ID")
    mkdir -p "$run_dir" || return
    # Made here, so that nobody else can take the name of a job to come.
    mkdir -m 0700 "$records" && chown "$SLURM_JOB_UID:$SLURM_JOB_GID" "$records"
    set -m # its own process group: Slurm kills that of this script when it ends
    "$python" "$here/sidecar.py" --sd-dir "$sd_dir" --exporter "$exporter" \
        --uid "$SLURM_JOB_UID" --gid "$SLURM_JOB_GID" -- --dir "$records" "${flags[@]}" \
        </dev/null >"$run_dir/$SLURM_JOB_ID.log" 2>&1 &
    echo $! >"$run_dir/$SLURM_JOB_ID.pid"
}

main || echo "torchmem: no sidecar for job ${SLURM_JOB_ID:-?}" >&2
exit 0
