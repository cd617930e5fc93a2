"""Grafana dashboards, Prometheus' settings and alert rules, and scripts that make, check and start them.

`table.py` is the table of what is shown; `python -m dashboards.build` writes it by Grafana's SDK. Queries are
put together by `queries.py`, which knows every metric from rayk.metrics and refuses others.
"""
