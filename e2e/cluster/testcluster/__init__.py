"""A single-node Kubernetes for end-to-end tests: real components, own network namespace, no downloads but packages."""
