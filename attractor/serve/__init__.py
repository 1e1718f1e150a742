"""Serving a model that keeps learning."""
