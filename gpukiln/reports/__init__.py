"""Findings and results of checks for readers and programs: text, HTML, JUnit, SARIF."""
