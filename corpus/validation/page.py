"""The page of a validation: one HTML file that needs nothing from the web."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from corpus.validation.drift import Drift
from infra.pages import style

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Validation of {{ verdict.suite }}</title>
<style>{{ css }}</style>
</head>
<body>
<header class="top"><h1>Validation of {{ verdict.suite }}</h1>
<p class="outcome {{ 'holds' if verdict.success else 'fails' }}">
{{ "All expectations hold." if verdict.success else "The data does not meet the expectations." }}</p>
<p>{{ "{:,}".format(verdict.rows) }} rows
{%- if verdict.rows_checked < verdict.rows %}, of which {{ "{:,}".format(verdict.rows_checked) }}, an even sample, were
looked at{% endif %}.</p></header>
<main>
<div class="table"><table class="stacked">
<thead><tr><th>expected</th><th>outcome</th><th>found</th><th>Great Expectations type</th></tr></thead>
<tbody>
{% for item in verdict.expectations %}
<tr><td>{{ item.sentence }}</td>
<td data-label="outcome" class="verdict-{{ 'holds' if item.success else 'fails' }}">
{{ "holds" if item.success else "fails" }}</td>
<td data-label="found">{{ item.observed | grouped }}</td>
<td data-label="Great Expectations type"><code>{{ item.expectation }}
{%- if item.column %}({{ item.column }}){% endif %}</code></td></tr>
{% endfor %}
</tbody>
</table></div>
{% if drift %}
<h2>Drift against the run before</h2>
<p>How far each distribution is from the one that the last validation of this data found. PSI is the population
stability index: under 0.1 there is no change to speak of, over 0.25 a large one. JS is the Jensen-Shannon divergence,
0 to 1 bit.</p>
<div class="table"><table class="stacked">
<thead><tr><th>Distribution</th><th>Change</th><th>PSI</th><th>JS</th><th>What moved most</th></tr></thead>
<tbody>
{% for one in drift %}
<tr><td>{{ one.name }}</td>
<td data-label="change" class="{{ 'verdict-fails' if one.psi > 0.25 else '' }}">{{ one.words }}</td>
<td data-label="PSI">{{ "%.3f"|format(one.psi) }}</td>
<td data-label="JS">{{ "%.3f"|format(one.jensen_shannon) }}</td>
<td data-label="what moved most">
{{ one.moved[0] }}: {{ "%.1f"|format(100 * one.moved[1]) }} % → {{ "%.1f"|format(100 * one.moved[2]) }} %</td></tr>
{% endfor %}
</tbody>
</table></div>
{% else %}
<p>There is no earlier validation of this data to compare with.</p>
{% endif %}
{% macro cells(row) %}
{% for name, value in row.items() if name not in ("sentence", "success") and value is not none and value != "" %}
<pre>{{ name }}: {{ value }}</pre>
{% endfor %}
{% endmacro %}
{% if sample %}
<h2>Some of the rows</h2>
<p>{{ sample | length }} rows at equal distances, cut after some hundred characters.</p>
<div class="table"><table>
<tbody>
{% for row in sample %}
<tr><td>{{ cells(row) }}</td></tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
{% if failing %}
<h2>Rows that are otherwise</h2>
<p>The first rows that are not as expected, cut after some hundred characters. An expectation can hold all the same, as
long as there are few of them.</p>
<div class="table"><table class="stacked">
<thead><tr><th>Expected</th><th>Row</th></tr></thead>
<tbody>
{% for row in failing %}
<tr><td>{{ row.sentence }}</td><td>{{ cells(row) }}</td></tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
</main>
</body>
</html>
"""


def grouped(found: str) -> str:
    """Format an observed value of an expectation, a plain number with its thousands grouped: `11,691`, `0.953`."""
    if not re.fullmatch(r"-?\d+(\.\d+)?", found):
        return found
    whole, point, fraction = found.partition(".")
    return f"{int(whole):,}{point}{fraction}" if len(whole) > 3 else found


def render(
    verdict: Mapping[str, Any],
    failing: Sequence[Mapping[str, Any]],
    drift: Sequence[Drift],
    sample: Sequence[Mapping[str, Any]] = (),
) -> str:
    """HTML of a verdict, of rows that are not as expected, of some rows, and of what moved; everything in it is
    escaped."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["grouped"] = grouped
    return environment.from_string(_PAGE).render(
        css=Markup(style()), verdict=verdict, failing=failing, drift=drift, sample=sample
    )
