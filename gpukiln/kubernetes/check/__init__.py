"""Finds mistakes about GPUs in manifests, charts' values, scripts and documents before they are applied.

The central values are `Reading` (reading.py: everything that was read), `ManifestRule` (rules.py: a rule,
made by the decorator `@rule`) and `CheckReport` (evaluate.py: the findings). A rule is a function that yields
violations; it lives in the module of its subject, and `registry.py` collects them.

reading, yaml_tree, values, workload   read files: documents with line numbers, pods, commands, queries
rules, rules_*, registry               the rules; docs/k8s-rules.md is generated from them
evaluate, output                       apply the rules; print the report as text, JUnit and SARIF
fit                                    on which machines a GPU pod can run
live                                   read a cluster instead of files; dry run on its API server
schema, keywords, formats, validation, relations   schema validation of Kubernetes' kinds, as strict as the
API server custom_schemas, custom_relations       the same for kinds of other projects, without their CRDs
crds, cel_functions                    custom objects by their CRD, with CEL rules
"""
