"""An EC2 that runs on this machine: moto's API server with machines that really boot behind it."""
