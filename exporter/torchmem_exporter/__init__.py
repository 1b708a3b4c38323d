"""torchmem's sidecar: reads what the ranks of a host leave behind and serves it to Prometheus.

Invariants: never imports torch; of the library only ``torchmem.wire``, ``torchmem.model``, ``torchmem.errors`` and the
version are used, so that an image of the sidecar holds no torch.
"""

from __future__ import annotations

from torchmem import __version__ as __version__  # the library and its sidecar are released together
