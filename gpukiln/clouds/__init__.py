"""EC2 as the rest of gpukiln uses it: the user's AWS account, or an EC2 that runs on this computer.

Central values: `base.Cloud` (a region of one of the two clouds; it gives boto3 clients), the tags in `tags`,
and `iam.Scope` (what a printed policy is limited to). Modules: `select` makes a cloud from --cloud; `aws` is
the account and `embedded/` the EC2 on this computer; `ec2` has images, instances, pages and the one wait loop
for EC2; `base.explain_aws_errors` turns boto3's errors into gpukiln's; `tags` has the name of every tag;
`iam` renders the policies that `cloud.policy` prints.
"""
