"""What Prometheus is told about torchmem's series, generated from one catalogue: rules, alerts, runbooks."""
