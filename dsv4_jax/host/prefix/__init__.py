"""The prefix cache: a tree of cached blocks, their snapshots, and their files."""
