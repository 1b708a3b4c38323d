"""Small real training jobs, shared by the tests and the benches, and the runner that gives each rank a process."""
