#!/usr/bin/env bash
# Slurm's TaskProlog: tells the job's ranks where to leave the records that the sidecar of prolog.sh reads, and under
# which name. What it prints becomes the environment of the task. A job that set these itself keeps its own.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=deploy/slurm/torchmem.conf
source "$here/torchmem.conf" || exit 0

[[ -n ${TORCHMEM_DIR:-} ]] || echo "export TORCHMEM_DIR=$(records_dir "$(id -u)" "$SLURM_JOB_ID")"
[[ -n ${TORCHMEM_TRAIN_JOB:-} ]] || echo "export TORCHMEM_TRAIN_JOB=${SLURM_JOB_NAME:-slurm}-$SLURM_JOB_ID"
