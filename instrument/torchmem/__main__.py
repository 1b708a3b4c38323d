"""``python -m torchmem``: the command without its installed script."""

from torchmem.cli import main

raise SystemExit(main())
