"""The CloudWatch agent's GPU section, for nodes whose cluster has no Prometheus.

The agent runs nvidia-smi and knows neither pods nor Xid errors. Names: aws/amazon-cloudwatch-agent,
translator/translate/metrics/metrics_collect/gpu and translator/config/schema.json.
"""

from __future__ import annotations

import json

from gpukiln.kubernetes.addons.settings import Settings

NAMESPACE = "Gpukiln"
MEASUREMENTS = (
    ("utilization_gpu", "Percent"),
    ("utilization_memory", "Percent"),
    ("memory_used", "Megabytes"),
    ("memory_total", "Megabytes"),
    ("temperature_gpu", "None"),
    ("power_draw", "None"),
    ("clocks_current_sm", "None"),
)


def text(_: Settings) -> str:
    settings = {
        "metrics": {
            "namespace": NAMESPACE,
            "append_dimensions": {
                "InstanceId": "${aws:InstanceId}",
                "InstanceType": "${aws:InstanceType}",
                "AutoScalingGroupName": "${aws:AutoScalingGroupName}",
            },
            # Each combination is a metric of its own, which CloudWatch bills.
            "aggregation_dimensions": [["InstanceId"], ["AutoScalingGroupName"]],
            "metrics_collected": {
                "nvidia_gpu": {
                    "measurement": [{"name": name, "unit": unit} for name, unit in MEASUREMENTS],
                    "metrics_collection_interval": 60,
                }
            },
        }
    }
    return json.dumps(settings, indent=2) + "\n"
