"""The controls: other ways to learn a new domain, one file each, all with the same few methods."""
