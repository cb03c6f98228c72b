"""Live nodes: converge them with the roles that bake images, and tell how they drifted."""
