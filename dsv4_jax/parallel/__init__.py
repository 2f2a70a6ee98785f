"""Sharding of a model and its cache over several devices: meshes, axis rules and collectives."""
