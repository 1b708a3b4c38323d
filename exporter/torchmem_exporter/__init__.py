"""The sidecar: publishes what the ranks of this host hold, from the records they leave; never imports torch."""

from torchmem import __version__ as __version__  # the library and its sidecar are released together
