# The GPU node image, for EC2 and for the embedded cloud, with Packer 1.6.6 and newer. Every value comes from
# gpukiln (`invoke ami.build`), which starts the machine, and makes the image of its disk when this is done: so the
# image has its tags from its first moment on, and Packer needs no right on AWS (gpukiln/images/bake.py, capture).
# Newer Packer needs the plugin that plugins/plugins.pkr.hcl names; 1.6.6 has it built in and must not see that file.

variable "ssh_host" {
  type = string
}

variable "ssh_port" {
  type = number
}

variable "ssh_username" {
  type = string
}

variable "ssh_private_key_file" {
  type = string
}

variable "playbook" {
  type = string
}

variable "extra_vars_file" {
  type        = string
  description = "JSON file with the plan, for Ansible."
}

source "null" "node" {
  communicator         = "ssh"
  ssh_host             = var.ssh_host
  ssh_port             = var.ssh_port
  ssh_username         = var.ssh_username
  ssh_private_key_file = var.ssh_private_key_file
  ssh_timeout          = "10m"
}

build {
  sources = ["source.null.node"]

  provisioner "ansible" {
    playbook_file = var.playbook
    user          = var.ssh_username
    use_proxy     = false
    extra_arguments = [
      "--extra-vars", "@${var.extra_vars_file}",
    ]
    ansible_env_vars = [
      "ANSIBLE_HOST_KEY_CHECKING=False",
      "ANSIBLE_NOCOLOR=True",
    ]
  }
}
