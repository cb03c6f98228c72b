# Only for Packer 1.7 and newer, where builders and provisioners are plugins; gpukiln puts this file beside the
# template when it finds such a Packer.
packer {
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = ">= 1.3.0, < 2.0.0"
    }
    ansible = {
      source  = "github.com/hashicorp/ansible"
      version = ">= 1.1.2, < 2.0.0"
    }
  }
}
