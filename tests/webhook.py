"""A receiver of Alertmanager's webhooks, in the test's own process: what came is there to look at from any thread.

Invariants: listens on a free port of the loopback interface; an alert that came is never forgotten.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from typing import NamedTuple

from backends import LOOPBACK


class Alert(NamedTuple):
    """One alert as a webhook brought it."""

    name: str
    train_job: str
    """Empty for an alert that is no job's."""
    annotations: dict[str, str]


class Webhook:
    """The receiver; made by ``receiving``."""

    def __init__(self):
        self._alerts = []
        self._guard = threading.Lock()
        self.url = ""

    def take(self, body):
        """Notes the firing alerts of one notification."""
        firing = [alert for alert in json.loads(body)["alerts"] if alert["status"] == "firing"]
        with self._guard:
            self._alerts += [
                Alert(one["labels"]["alertname"], one["labels"].get("train_job", ""), one["annotations"])
                for one in firing
            ]

    @property
    def alerts(self):
        """All that came, the first first."""
        with self._guard:
            return tuple(self._alerts)

    def first(self, name, train_job):
        """The first alert of a name and a job; None before it came."""
        return next((one for one in self.alerts if (one.name, one.train_job) == (name, train_job)), None)


@contextlib.contextmanager
def receiving():
    """A receiver that listens, ended at the end."""
    webhook = Webhook()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            webhook.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            """Says nothing."""

    with http.server.ThreadingHTTPServer((LOOPBACK, 0), Handler) as server:
        webhook.url = f"http://{LOOPBACK}:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield webhook
        finally:
            server.shutdown()
            thread.join()
