"""Who a block's points come from, as OpenTelemetry resource attributes.

A rank is a service instance of its training job; what is said of a job as a whole comes from this host's view of it;
the sidecar is a service of its own. ``OTEL_RESOURCE_ATTRIBUTES`` extends and overrides them all, except for what tells
ranks and jobs apart.

Invariants: two blocks of one exposition never have the same attributes; values are valid UTF-8.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from torchmem.errors import ConfigError
from torchmem_exporter import __version__
from torchmem_exporter.labels import clean_label
from torchmem_exporter.points import Block

DEFAULT_SERVICE_NAME = "torchmem-exporter"

Attributes = dict[str, str | int]

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "i686": "x86", "ppc64le": "ppc64"}
"""The kernel's names where the semantic conventions have others."""

_NODE_VARIABLES = {"k8s.cluster.name": "K8S_CLUSTER_NAME", "k8s.node.name": "K8S_NODE_NAME"}
_POD_VARIABLES = {
    "k8s.namespace.name": "K8S_NAMESPACE_NAME",
    "k8s.pod.name": "K8S_POD_NAME",
    "k8s.pod.uid": "K8S_POD_UID",
}
_CONTAINER_VARIABLES = {"k8s.container.name": "K8S_CONTAINER_NAME"}
_IDENTIFYING = ("service.name", "service.instance.id", "process.pid")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Gives blocks their attributes.

    Attributes:
        host: name of this host, or of the pod, as ranks beside the sidecar see it too.
        given: what the user has set, which wins.
        of_node: attributes of this machine, whichever container a rank is in.
        of_pod: attributes of what shares the sidecar's host name.
        of_container: attributes of the sidecar's container alone.
    """

    host: str = field(default_factory=lambda: clean_label(socket.gethostname()))
    given: Mapping[str, str] = field(default_factory=dict)
    of_node: Mapping[str, str] = field(default_factory=dict)
    of_pod: Mapping[str, str] = field(default_factory=dict)
    of_container: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Resources:
        """What this machine and the environment say.

        Raises:
            ConfigError: ``OTEL_RESOURCE_ATTRIBUTES`` or ``OTEL_SERVICE_NAME`` cannot be used.
        """
        given = _parse(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
        if environ.get("OTEL_SERVICE_NAME"):
            given["service.name"] = _checked(environ["OTEL_SERVICE_NAME"], "OTEL_SERVICE_NAME")
        machine = platform.machine()
        arch_and_os = {"host.arch": _ARCHITECTURES.get(machine, machine), "os.type": sys.platform}
        return cls(
            given=given,
            of_node=arch_and_os | _read(environ, _NODE_VARIABLES),
            of_pod=_read(environ, _POD_VARIABLES),
            of_container=_read(environ, _CONTAINER_VARIABLES),
        )

    def attributes(self, block: Block) -> Attributes:
        """The attributes of the resource that a block is of, in alphabetical order."""
        found = {**self._known(block), **self.given}
        found.update(self._identifying(block))
        return dict(sorted(found.items()))

    def _known(self, block: Block) -> Attributes:
        host = clean_label(block.identity.host) if block.identity else self.host
        known: Attributes = {"host.name": host, **self.of_node}
        # A sidecar of the whole node is in another pod than the ranks: their host names tell.
        if host == self.host:
            known.update(self.of_pod)
        if not block.key:
            known.update({"service.name": DEFAULT_SERVICE_NAME, "service.instance.id": self.host})
            known.update({"service.version": __version__, **self.of_container})
        return known

    def _identifying(self, block: Block) -> Attributes:
        if not block.key:
            return {"process.pid": os.getpid()}
        train_job, *rank = block.key
        # Not a new UUID for each life of a process: backends make this the label ``instance``, and a restarted rank
        # would begin all of its series anew. Within its job a rank is unique.
        identifying: Attributes = {"service.name": train_job, "service.instance.id": "-".join(["rank", *rank])}
        if block.identity is None:
            # Each host says what it sees of a job; without a name they would all write one series.
            identifying["service.instance.id"] = self.host
        else:
            identifying["process.pid"] = block.identity.pid
        return identifying


def _read(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The attributes whose variables are set, as Kubernetes' downward API may set them."""
    return {name: _checked(environ[key], key) for name, key in variables.items() if environ.get(key)}


def _parse(text: str) -> dict[str, str]:
    """``key=value,key=value`` with percent-encoded values."""
    attributes = {}
    for pair in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (name and equals):
            raise ConfigError(f"OTEL_RESOURCE_ATTRIBUTES: {pair!r} is no key=value: write key1=value1,key2=value2")
        attributes[_checked(name, "OTEL_RESOURCE_ATTRIBUTES")] = _checked(value, "OTEL_RESOURCE_ATTRIBUTES")
    return attributes


def _checked(text: str, variable: str) -> str:
    """The text, percent-decoded where it is an encoded attribute."""
    try:
        decoded = unquote(text, errors="strict") if variable == "OTEL_RESOURCE_ATTRIBUTES" else text
        decoded.encode()
    except UnicodeError:
        raise ConfigError(f"{variable}: {text!r} is not UTF-8: give text, percent-encoded where needed") from None
    return decoded
