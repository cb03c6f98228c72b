"""How long `k8s.check` takes for a thousand manifests: schemas, rules, and the machines that each pod fits.

    scripts/run python -m bench.kubernetes

Five kinds by turns, each with names, requests and selectors of its own: nothing is judged once for all. The
floor is reading the same texts with libyaml alone. See bench/README.md, "Manifests".
"""

import time

import yaml

from gpukiln.kubernetes.check.evaluate import apply_rules
from gpukiln.kubernetes.check.reading import Reading
from gpukiln.kubernetes.check.rules import Context

BAR_S = 5.0
MANY = 1000
POD = """
      restartPolicy: Never
      nodeSelector: {{nvidia.com/gpu.product: {product}}}
      tolerations: [{{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}}]
      containers:
        - name: main
          image: registry.example/train@sha256:{number:064x}
          resources:
            requests: {{cpu: {cpu}m, memory: {memory}Mi}}
            limits: {{memory: {memory}Mi, nvidia.com/gpu: "{gpus}"}}
"""
KINDS = (
    "apiVersion: batch/v1\nkind: Job\nmetadata: {{name: a-{number}}}\nspec:\n  backoffLimit: 3\n"
    "  activeDeadlineSeconds: 3600\n  ttlSecondsAfterFinished: 600\n  template:\n    spec:" + POD,
    "apiVersion: batch/v1\nkind: CronJob\nmetadata: {{name: a-{number}}}\nspec:\n  schedule: '0 3 * * *'\n"
    "  jobTemplate:\n   spec:\n    template:\n     spec:" + POD.replace("\n      ", "\n       "),
    "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: a-{number}}}\nspec:\n"
    "  selector: {{matchLabels: {{app: a}}}}\n  template:\n    metadata: {{labels: {{app: a}}}}\n    spec:"
    + POD.replace("      restartPolicy: Never\n", ""),
    "apiVersion: v1\nkind: Service\nmetadata: {{name: a-{number}}}\nspec:\n  selector: {{app: a}}\n"
    "  ports: [{{port: 80}}]\n",
    "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: a-{number}}}\ndata: {{key: '{cpu}'}}\n",
)
PRODUCTS = ("Tesla-T4", "NVIDIA-A10G", "NVIDIA-L4", "NVIDIA-L40S")


def manifest(number: int) -> str:
    return KINDS[number % len(KINDS)].format(
        number=number,
        product=PRODUCTS[number % len(PRODUCTS)],
        cpu=1000 + number,
        memory=4096 + number,
        gpus=1 + number % 2,
    )


def main() -> int:
    """All of it three times; the middle one counts."""
    texts = [manifest(number) for number in range(MANY)]
    apply_rules(Reading(), Context())  # what is loaded once
    took = []
    for _ in range(3):
        began = time.perf_counter()
        for text in texts:
            list(yaml.load_all(text, Loader=yaml.CSafeLoader))
        floor = time.perf_counter()
        reading = Reading()
        for number, text in enumerate(texts):
            reading.text(text, f"{number}.yaml")
        report = apply_rules(reading, Context(resources=tuple(reading.resources)))
        took.append((time.perf_counter() - floor, floor - began))
    whole, floor = sorted(took)[1]
    counts = report.counts
    print(f"{counts.objects} objects, {counts.pods} pods, {counts.errors} errors, {counts.warnings} warnings")
    print(f"k8s.check {whole:.2f} s (bar {BAR_S} s), {whole / floor:.1f} times reading alone ({floor:.2f} s)")
    return int(whole > BAR_S)


if __name__ == "__main__":
    raise SystemExit(main())
