"""Input and output: the API server, Ray heads, trainers, metrics, health."""
