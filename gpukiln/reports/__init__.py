"""Writers of reports: findings and results of checks as text, HTML, JUnit XML and SARIF.

They know nothing of what is reported: `gpukiln.verify` and `gpukiln.kubernetes` give them findings or
cases.

- `tables`: rows on a terminal; `html`: pages that load nothing, in the frame `frame.html.j2`; `junit`: for
  CI; `sarif`: for code scanning.
- `sanitize`: removes secrets and control characters; everything that a report shows passes through it.
"""
