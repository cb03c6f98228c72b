#!/usr/bin/env bash
# Installs or upgrades these add-ons in the cluster of kubectl's current context.
# Helm 4 uses server-side apply: on a conflict, add --force-conflicts to its command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

apply() {
  kubectl apply --server-side --field-manager=gpukiln ${FORCE_CONFLICTS:+--force-conflicts} \
    --filename "$1" || {
    echo "$1: on a conflict, another manager has set these fields: to leave them to it, remove them" >&2
    echo "from $1; to take them over, run FORCE_CONFLICTS=1 bash install.sh" >&2
    return 1
  }
}

apply namespace.yaml

# NVIDIA's device plugin with feature discovery
helm upgrade --install nvidia-device-plugin nvidia-device-plugin --repo https://nvidia.github.io/k8s-device-plugin \
  --version 0.20.0 --namespace gpu-system --create-namespace \
  --values device-plugin/values.yaml --wait --timeout 10m

# the nodes' health as condition and taint
apply health/gpu-health.yaml

# metrics, rules and alerts of the GPUs
helm upgrade --install dcgm-exporter dcgm-exporter --repo https://nvidia.github.io/dcgm-exporter/helm-charts \
  --version 4.8.4 --namespace gpu-system --create-namespace \
  --values monitoring/values.yaml --wait --timeout 10m
if kubectl get crd servicemonitors.monitoring.coreos.com prometheusrules.monitoring.coreos.com >/dev/null; then
  apply monitoring/objects.yaml
  apply monitoring/grafana.yaml
else
  echo "no Prometheus Operator: load monitoring/plain into Prometheus and Grafana" >&2
fi

# Kueue with a queue for each team
helm upgrade --install kueue oci://registry.k8s.io/kueue/charts/kueue \
  --version 0.19.2 --namespace kueue-system --create-namespace \
  --values queue/values.yaml --wait --timeout 10m
apply queue/queues.yaml

# GitHub Actions runners
helm upgrade --install arc oci://ghcr.io/actions/actions-runner-controller-charts/gha-runner-scale-set-controller \
  --version 0.14.2 --namespace arc-systems --create-namespace \
  --values runners/controller-values.yaml --wait --timeout 10m
apply runners/objects.yaml
# The Secret has github_app_id, github_app_installation_id and github_app_private_key, or github_token.
kubectl --namespace arc-runners get secret runner-gpu-github
helm upgrade --install runner-gpu oci://ghcr.io/actions/actions-runner-controller-charts/gha-runner-scale-set \
  --version 0.14.2 --namespace arc-runners --create-namespace \
  --values runners/values.yaml --wait --timeout 10m
