"""The sidecar: publishes what the ranks of this host hold, from the records they leave; never imports torch."""

__version__ = "0.1.0"
