"""``python -m torchmem_exporter``: the same as the command ``torchmem-exporter``."""

from __future__ import annotations

import sys

from torchmem_exporter.cli import main

sys.exit(main())
