"""How a model and its cache are cut over several devices: the mesh's axes, and what each of them cuts."""
