# The contract's outputs (docs/schemas/workspace.json, Outputs); empty texts while no machine runs.

output "agent_endpoint" {
  value = try(aws_instance.machine[0].private_ip, "")
}

output "runtime_env" {
  value = merge(local.rendered.runtime_env, {
    (local.rendered.variables.instance) = try(aws_instance.machine[0].id, "")
    (local.rendered.variables.host)     = try(aws_instance.machine[0].private_ip, "")
  })
}

output "volume_mounts" {
  value = [
    for volume in aws_ebs_volume.home : {
      volume_id  = volume.id
      mount_path = local.home.mount_path
      size_gib   = volume.size
      persistent = true
    }
  ]
}

output "metadata" {
  value = {
    image_id     = local.rendered.image.image_id
    image_digest = local.rendered.image.image_digest
    verdict      = local.rendered.image.verdict
    plan         = format(local.offer.plan, local.zone)
    usd_hour     = local.offer.usd_hour
    launched_at  = try(terraform_data.launched[0].output, "")
  }
}

output "instance_id" {
  value = try(aws_instance.machine[0].id, "")
}

output "instance_type" {
  value = local.offer.instance_type
}

output "gpu_type" {
  value = local.offer.gpu_type
}

output "gpu_count" {
  value = local.offer.gpu_count
}

output "zone" {
  value = local.zone
}

# What the machine says of itself comes after its boot: with the next `terraform refresh`.
output "driver_version" {
  value = try(aws_instance.machine[0].tags[local.tag.driver], "")
}

output "health" {
  value = try(aws_instance.machine[0].tags[local.tag.health], "unknown: not checked")
}
