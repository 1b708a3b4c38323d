"""Checks PromQL against the exporter's catalog: every metric exists, and every label where it is used.

``labels_of`` walks an expression and returns the labels that its result may have; it raises ``QueryError`` for a metric
that no one exposes or records, and for a label that is matched, grouped or joined on where it cannot be.
"""

from __future__ import annotations

import promql_parser as promql

from torchmem_exporter import catalog

SCRAPE_LABELS = frozenset({"job", "instance"})
EXPOSED = {metric.prometheus_name: frozenset(metric.labels) | SCRAPE_LABELS for metric in catalog.METRICS}
EXPOSED["up"] = EXPOSED["scrape_samples_scraped"] = SCRAPE_LABELS
EXPOSED["ALERTS"] = frozenset({"alertname", "alertstate", "severity", "train_job", "labeler", "reason"})
INCLUDE, BY = promql.LabelModifierType.Include, promql.AggModifierType.By
SETS = {"and", "or", "unless"}


class QueryError(Exception):
    """A query asks for what is not there."""


def labels_of(query, recorded=None):
    """The labels that a query's result may have.

    Args:
        query: PromQL.
        recorded: labels of recorded series by name.
    """
    try:
        parsed = promql.parse(query)
    except ValueError as error:
        raise QueryError(f"{error}: {query}") from None
    return _labels(parsed, EXPOSED | (recorded or {}))


def recorded_labels(recordings):
    """Labels of recorded series by name; each may use those before it."""
    known = {}
    for one in recordings:
        known[one.name] = labels_of(one.expr, known)
    return known


def _labels(node, known):
    handlers = {
        promql.VectorSelector: _selector,
        promql.MatrixSelector: lambda node, known: _labels(node.vector_selector, known),
        promql.SubqueryExpr: lambda node, known: _labels(node.expr, known),
        promql.ParenExpr: lambda node, known: _labels(node.expr, known),
        promql.UnaryExpr: lambda node, known: _labels(node.expr, known),
        promql.AggregateExpr: _aggregate,
        promql.BinaryExpr: _binary,
        promql.Call: _call,
    }
    handler = handlers.get(type(node))
    return handler(node, known) if handler else frozenset()


def _selector(node, known):
    matchers = {matcher.name: matcher.value for matcher in node.matchers.matchers}
    names = [node.name] if node.name else matchers.pop("__name__").split("|")
    for name in names:
        if name not in known:
            raise QueryError(f"nobody exposes {name}")
        _need(matchers, known[name], f"{name}: matched on")
    return frozenset().union(*(known[name] for name in names))


def _aggregate(node, known):
    inner = _labels(node.expr, known)
    if node.modifier is None:
        return inner if str(node.op) in {"topk", "bottomk"} else frozenset()
    grouped = frozenset(node.modifier.labels)
    _need(grouped - {"__name__"}, inner, f"{node.op}: grouped by")
    if str(node.op) in {"topk", "bottomk"}:
        return inner
    return grouped - {"__name__"} if node.modifier.type == BY else inner - grouped


def _binary(node, known):
    left, right = _labels(node.lhs, known), _labels(node.rhs, known)
    if any(isinstance(side, promql.NumberLiteral) for side in (node.lhs, node.rhs)) or _is_scalar(node):
        return left | right
    matching = node.modifier.matching if node.modifier else None
    joins_on = matching is not None and matching.type == INCLUDE
    if joins_on:
        _need(matching.labels, left, f"{node.op}: on the left joined on")
        _need(matching.labels, right, f"{node.op}: on the right joined on")
    elif str(node.op) != "or":
        ignored = frozenset(matching.labels) if matching else frozenset()
        _need(ignored, left | right, f"{node.op}: ignored")
        if left - ignored != right - ignored:
            raise QueryError(f"{node.op}: {sorted(left - ignored)} never matches {sorted(right - ignored)}")
    if str(node.op) in SETS:
        return left | right if str(node.op) == "or" else left
    kind = node.modifier.card if node.modifier else promql.VectorMatchCardinality.OneToOne
    if kind == promql.VectorMatchCardinality.OneToOne:
        return (
            frozenset(matching.labels) if joins_on and str(node.op) not in {">", "<", ">=", "<=", "==", "!="} else left
        )
    many, one = (left, right) if kind == promql.VectorMatchCardinality.ManyToOne else (right, left)
    added = frozenset(node.modifier.group_labels)
    _need(added, one, f"{node.op}: taken over")
    return many | added


def _is_scalar(node):
    return any(isinstance(side, promql.Call) and side.func.name == "time" for side in (node.lhs, node.rhs))


def _call(node, known):
    return frozenset().union(*(_labels(argument, known) for argument in node.args))


def _need(wanted, there, what):
    missing = set(wanted) - set(there)
    if missing:
        raise QueryError(f"{what} {sorted(missing)}, which is not among {sorted(there)}")
