"""The HTTP side of a server: the app, its routes, and what protects them."""
