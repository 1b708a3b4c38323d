"""From a directory of records to the state of each rank, or the reason why not; what outlives a rank or the sidecar."""
