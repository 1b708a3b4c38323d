"""``python -m torchmem_exporter``: the sidecar without its installed command."""

from torchmem_exporter.cli import main

raise SystemExit(main())
