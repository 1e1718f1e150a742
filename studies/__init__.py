"""What reproduces the figures of this project. Nothing in the package imports it."""
