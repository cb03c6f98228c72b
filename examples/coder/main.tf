# A workspace of gpukiln. What is made, and of what size, was decided when the file was rendered, by the same
# code as `invoke workspace.up`; nothing is chosen here.

locals {
  rendered = jsondecode(file(var.rendered))
  machine  = local.rendered.machine
  group    = local.rendered.security_group
  role     = local.rendered.role
  home     = local.rendered.home
  tag      = local.rendered.tag_names
  offer    = local.rendered.offers[var.offer]

  subnet_ids  = coalescelist(var.subnet_ids, sort(data.aws_subnets.all.ids))
  zone        = data.aws_subnet.this.availability_zone
  has_rights  = var.capabilities.identity_mode == "iam"
  own_profile = local.has_rights && var.instance_profile_name == null
  profile     = local.own_profile ? one(aws_iam_instance_profile.this[*].name) : var.instance_profile_name

  asked = {
    workspace_name        = var.workspace_name
    owner                 = var.owner
    region                = var.region
    compute_profile       = var.compute_profile
    capabilities          = var.capabilities
    toolchain_template    = var.toolchain_template
    image_id              = var.image_id
    instance_types        = var.instance_types
    vpc_id                = var.vpc_id
    subnet_ids            = var.subnet_ids
    instance_profile_name = var.instance_profile_name
    agent_init_script     = var.agent_init_script
    ssh_from              = var.ssh_from
    services              = var.services
    spot                  = var.spot
    idle_minutes          = var.idle_minutes
  }
}

data "aws_subnets" "all" {
  filter {
    name   = var.vpc_id == null ? "default-for-az" : "vpc-id"
    values = [coalesce(var.vpc_id, "true")]
  }
}

data "aws_caller_identity" "this" {}

data "aws_subnet" "this" {
  id = local.subnet_ids[var.subnet]
}

resource "aws_security_group" "this" {
  name        = local.group.name
  description = local.group.description
  vpc_id      = data.aws_subnet.this.vpc_id
  tags        = local.group.tags

  # Rules in line are all the rules there are, and may be known only when they are applied.
  dynamic "ingress" {
    for_each = local.group.ingress
    content {
      protocol         = ingress.value.protocol
      from_port        = ingress.value.from_port
      to_port          = ingress.value.to_port
      cidr_blocks      = ingress.value.cidr_blocks
      ipv6_cidr_blocks = ingress.value.ipv6_cidr_blocks
    }
  }

  dynamic "egress" {
    for_each = local.group.egress
    content {
      protocol         = egress.value.protocol
      from_port        = egress.value.from_port
      to_port          = egress.value.to_port
      cidr_blocks      = egress.value.cidr_blocks
      ipv6_cidr_blocks = egress.value.ipv6_cidr_blocks
    }
  }

  lifecycle {
    precondition {
      condition     = jsonencode(local.asked) == jsonencode(local.rendered.wanted)
      error_message = "The rendered file is of other inputs: write it again with workspace.render."
    }
  }
}

# The boundary is the account's: `invoke cloud.policy --for workspace-boundary` prints it.
resource "aws_iam_role" "this" {
  count                = local.own_profile ? 1 : 0
  name                 = local.role.name
  path                 = local.role.path
  assume_role_policy   = local.role.assume_role_policy
  permissions_boundary = format(local.role.permissions_boundary, data.aws_caller_identity.this.account_id)
  tags                 = local.role.tags
}

resource "aws_iam_role_policy" "this" {
  count  = local.own_profile ? 1 : 0
  name   = local.role.policy_name
  role   = aws_iam_role.this[0].name
  policy = local.role.policy
}

resource "aws_iam_instance_profile" "this" {
  count = local.own_profile ? 1 : 0
  name  = local.role.name
  path  = local.role.path
  role  = aws_iam_role.this[0].name
  tags  = local.role.tags
}

# `down --keep-home` in Terraform: `terraform state rm` of this volume before the workspace goes.
resource "aws_ebs_volume" "home" {
  count             = var.capabilities.persistent_home ? 1 : 0
  availability_zone = local.zone
  size              = local.home.size
  type              = local.home.volume_type
  encrypted         = local.home.encrypted
  tags              = local.home.tags

  lifecycle {
    ignore_changes = [availability_zone] # another zone would be another volume, and an empty one
  }
}

resource "aws_instance" "machine" {
  count                                = var.running ? 1 : 0
  ami                                  = local.machine.ami
  instance_type                        = local.offer.instance_type
  subnet_id                            = data.aws_subnet.this.id
  vpc_security_group_ids               = [aws_security_group.this.id]
  iam_instance_profile                 = local.has_rights ? local.profile : null
  user_data_base64                     = local.machine.user_data_base64
  user_data_replace_on_change          = true # cloud-init reads it at an instance's first boot alone
  instance_initiated_shutdown_behavior = local.machine.instance_initiated_shutdown_behavior

  # The machine reads there which volume is its home.
  tags = merge(
    local.machine.tags,
    local.offer.tags,
    { (local.tag.plan) = format(local.offer.plan, local.zone) },
    { for volume in aws_ebs_volume.home : (local.tag.home) => volume.id },
  )

  metadata_options {
    http_endpoint               = local.machine.metadata_options.http_endpoint
    http_tokens                 = local.machine.metadata_options.http_tokens
    http_put_response_hop_limit = local.machine.metadata_options.http_put_response_hop_limit
    instance_metadata_tags      = local.machine.metadata_options.instance_metadata_tags
  }

  root_block_device {
    volume_type           = local.machine.root_block_device.volume_type
    encrypted             = local.machine.root_block_device.encrypted
    delete_on_termination = local.machine.root_block_device.delete_on_termination
    tags                  = local.machine.root_block_device.tags
  }

  dynamic "instance_market_options" {
    for_each = local.offer.instance_market_options[*]
    content {
      market_type = instance_market_options.value.market_type
      spot_options {
        spot_instance_type             = instance_market_options.value.spot_options.spot_instance_type
        instance_interruption_behavior = instance_market_options.value.spot_options.instance_interruption_behavior
      }
    }
  }

  lifecycle {
    # The machine writes these itself.
    ignore_changes = [
      tags["gpukiln:stage"],
      tags["gpukiln:health"],
      tags["gpukiln:busy"],
      tags["gpukiln:driver"],
    ]

    precondition {
      condition     = alltrue([for volume in aws_ebs_volume.home : volume.availability_zone == local.zone])
      error_message = "The home is in another zone than the subnet: name a subnet of its zone."
    }
  }

  depends_on = [aws_iam_role_policy.this]
}

resource "aws_volume_attachment" "home" {
  count        = var.running && var.capabilities.persistent_home ? 1 : 0
  device_name  = local.home.device_name
  volume_id    = aws_ebs_volume.home[0].id
  instance_id  = aws_instance.machine[0].id
  skip_destroy = true # the machine ends with its home mounted, and EC2 detaches it then
}

# When the machine was launched, which stays what it is until there is another machine.
resource "terraform_data" "launched" {
  count            = var.running ? 1 : 0
  input            = timestamp()
  triggers_replace = aws_instance.machine[0].id

  lifecycle {
    ignore_changes = [input]
  }
}
