"""The pipeline of an image: bake it, verify it on a machine booted from it, sign and tag the verdict.

It takes a `Plan` and returns a `Build` with its `Record`, whose `Verdict` a release compares with its
channel.

- `steps`: bake, verify and attest, with a record of each; `verify`: verifies an image that exists already.
- `verdict_tags`: the tags of an AMI that hold its verdicts, one for each instance type, and as a node for
  each version of Kubernetes, too; `verdict_signing`: the verdict as a signed statement.
"""
