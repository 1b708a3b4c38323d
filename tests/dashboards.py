"""Dashboards as Grafana would run them: variables resolved from a real Prometheus, then written into each query.

Followed: ``label_values(selector, label)`` and ``query_result(query)`` with their ``regex``; one value is escaped for a
string, several are for a regular expression as well, and all are what ``allValue`` says; ``$__rate_interval`` and
its like are the query's own.
"""

from __future__ import annotations

import json
import re
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import backends

FOLDER = Path(__file__).resolve().parent.parent / "grafana" / "dashboards"
FLEET, JOB, RANK, ITSELF = UIDS = ("torchmem-fleet", "torchmem-job", "torchmem-rank", "torchmem-itself")
ALL = "$__all"
VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?::\w+)?\}|\[\[(\w+)\]\]")
LABEL_VALUES = re.compile(r"label_values\((?:(.*),\s*)?(\w+)\)", re.DOTALL)
QUERY_RESULT = re.compile(r"query_result\((.*)\)", re.DOTALL)
REGEX_SPECIAL = re.compile(r"[\\^$*+?.()|[\]{}]")
RANGE_SECONDS, STEP_SECONDS, SCRAPE_SECONDS = 1800, 2, 2
"""All that the tests' Prometheus has scraped, however long ago: what leaks does so for a minute only."""
BUILT_IN = {
    "__rate_interval": f"{max(STEP_SECONDS + SCRAPE_SECONDS, 4 * SCRAPE_SECONDS)}s",
    "__interval": f"{STEP_SECONDS}s",
    "__range": f"{RANGE_SECONDS}s",
}


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard."""

    dashboard: str
    title: str
    kind: str
    targets: tuple[dict, ...]


def load(uid):
    """A dashboard as it is checked in."""
    return json.loads((FOLDER / f"{uid}.json").read_text(encoding="utf-8"))


def panels(dashboard):
    """All panels but the rows' headings."""
    return [
        Panel(dashboard["uid"], panel["title"], panel["type"], tuple(panel["targets"]))
        for panel in dashboard["panels"]
        if panel["type"] != "row"
    ]


def variables(dashboard):
    """The variables that are asked of Prometheus, in their order."""
    return [one for one in dashboard["templating"]["list"] if one["type"] == "query"]


def substituted(text, values):
    """A text with variables written into it.

    Raises:
        KeyError: there is no such variable.
    """
    known = BUILT_IN | values
    return VARIABLE.sub(lambda match: known[next(filter(None, match.groups()))], text)


def resolved(server, dashboard, chosen):
    """Each variable as it is written into queries.

    Args:
        server: Prometheus.
        dashboard: whose variables they are.
        chosen: values by variable, a list for several; of the others the first value, or all, is taken.
    """
    values = {}
    for variable in variables(dashboard):
        options = options_of(server, variable, values)
        assert options, f"{dashboard['uid']}: ${variable['name']} has no values"
        first = ALL if variable.get("includeAll") else options[0]
        values[variable["name"]] = written(variable, chosen.get(variable["name"], first))
    return values


def written(variable, value):
    """A variable's value, or several, as Grafana's Prometheus data source writes them."""
    if value == ALL:
        return variable["allValue"]
    if not variable.get("multi"):
        return value.replace("\\", "\\\\").replace('"', '\\"')
    escaped = [REGEX_SPECIAL.sub(r"\\\\\g<0>", one) for one in ([value] if isinstance(value, str) else value)]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def options_of(server, variable, values):
    """The values that a variable offers, sorted as it says."""
    query = substituted(variable["query"], values)
    if match := LABEL_VALUES.fullmatch(query):
        selector, label = match.groups()
        options = label_values(server, selector, label)
    else:
        options = query_result(server, QUERY_RESULT.fullmatch(query).group(1))
    if pattern := variable.get("regex"):
        found = (re.search(pattern.strip("/"), option) for option in options)
        options = [match.group(1) for match in found if match]
    return sorted(options, reverse=variable.get("sort") in {2, 4, 6, 8}) if variable.get("sort") else options


def label_values(server, selector, label):
    """What Grafana's ``label_values`` gives for the last minutes."""
    options = {"match[]": selector} if selector else {}
    return ask(server, f"label/{label}/values", **options)


def query_result(server, query):
    """What Grafana's ``query_result`` gives: series as text, the highest first."""
    rows = ask(server, "query", query=query)["result"]
    return [
        "{" + ",".join(f'{name}="{value}"' for name, value in row["metric"].items()) + "} " + row["value"][1]
        for row in rows
    ]


def ask(server, path, **parameters):
    """What Prometheus' API answers."""
    answer = backends.get(f"{server.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
    return json.loads(answer)["data"]


def num_series(server, target, values):
    """Of how many series a query has a value, asked of now or of the range as the target says."""
    query = substituted(target["expr"], values)
    if target.get("instant"):
        rows = ask(server, "query", query=query)["result"]
        return sum(row["value"][1] != "NaN" for row in rows)
    end = time.time()
    rows = ask(server, "query_range", query=query, start=end - RANGE_SECONDS, end=end, step=STEP_SECONDS)["result"]
    return sum(any(value != "NaN" for _, value in row["values"]) for row in rows)
