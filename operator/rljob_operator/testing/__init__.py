"""Test doubles and fixtures: a real API server without nodes, a fake Ray head, a stand-in for KubeRay."""
