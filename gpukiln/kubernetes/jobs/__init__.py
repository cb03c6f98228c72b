"""GPU jobs: a request, checked by the catalogue, becomes manifests that the API server and the nodes take."""
