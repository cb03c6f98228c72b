"""Live nodes: converge them with the roles that bake images, and report how they drifted."""
