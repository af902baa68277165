"""The page of a validation: one HTML file that needs nothing from the web."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Validation of {{ verdict.suite }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1d2430; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid #d7dce3; }
td pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.4 ui-monospace, monospace; }
.holds { color: #14692f; } .fails { color: #a3161b; font-weight: 600; }
</style>
</head>
<body>
<h1>Validation of {{ verdict.suite }}</h1>
<p class="{{ 'holds' if verdict.success else 'fails' }}">
{{ "All expectations hold." if verdict.success else "The data does not meet the expectations." }}</p>
<p>{{ "{:,}".format(verdict.rows) }} rows
{%- if verdict.rows_checked < verdict.rows %}, of which {{ "{:,}".format(verdict.rows_checked) }}, an even sample, were
looked at{% endif %}.</p>
<table>
<thead><tr><th>Expected</th><th>Outcome</th><th>Found</th><th>Great Expectations type</th></tr></thead>
<tbody>
{% for item in verdict.expectations %}
<tr><td>{{ item.sentence }}</td>
<td class="{{ 'holds' if item.success else 'fails' }}">{{ "holds" if item.success else "fails" }}</td>
<td>{{ item.observed }}</td><td><code>{{ item.expectation }}({{ item.column }})</code></td></tr>
{% endfor %}
</tbody>
</table>
{% if failing %}
<h2>Rows that are otherwise</h2>
<p>The first rows that are not as expected, cut after some hundred characters. An expectation can hold all the same, as
long as there are few of them.</p>
<table>
<thead><tr><th>Expected</th><th>Row</th></tr></thead>
<tbody>
{% for row in failing %}
<tr><td>{{ row.sentence }}</td><td>
{% for name, value in row.items() if name not in ("sentence", "success") %}
<pre>{{ name }}: {{ value }}</pre>
{% endfor %}
</td></tr>
{% endfor %}
</tbody>
</table>
{% endif %}
</body>
</html>
"""


def render(verdict: Mapping[str, Any], failing: Sequence[Mapping[str, Any]]) -> str:
    """HTML of a verdict and of rows that are not as expected; everything in it is escaped."""
    from jinja2 import Environment

    return Environment(autoescape=True, trim_blocks=True).from_string(_PAGE).render(verdict=verdict, failing=failing)
