"""The CloudWatch agent's section for GPUs, for nodes that no Prometheus asks.

It asks nvidia-smi, and knows nothing of Xids, ECC and remapping: those stay with `gpukiln-gpu health`.
"""

from __future__ import annotations

import json

from gpukiln.kubernetes.addons.settings import Settings

# Measurements by CloudWatch's names, docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/
# CloudWatch-Agent-NVIDIA-GPU.html; each costs as a custom metric for each GPU.
MEASURED = (
    "utilization_gpu",
    "utilization_memory",
    "memory_total",
    "memory_used",
    "memory_free",
    "temperature_gpu",
    "power_draw",
    "clocks_current_sm",
    "pcie_link_width_current",
)


def agent(settings: Settings) -> str:
    """What goes to /opt/aws/amazon-cloudwatch-agent/etc/amazon-cloudwatch-agent.d/ of a node."""
    return (
        json.dumps(
            {
                "agent": {"metrics_collection_interval": 60},
                "metrics": {
                    "namespace": f"gpukiln/{settings.cluster}",
                    "append_dimensions": {
                        "InstanceId": "${aws:InstanceId}",
                        "InstanceType": "${aws:InstanceType}",
                        "AutoScalingGroupName": "${aws:AutoScalingGroupName}",
                    },
                    "aggregation_dimensions": [["InstanceId"], ["AutoScalingGroupName"]],
                    "metrics_collected": {"nvidia_gpu": {"measurement": list(MEASURED)}},
                },
            },
            indent=2,
        )
        + "\n"
    )
