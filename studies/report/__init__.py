"""Results of studies as one HTML page and as Markdown with figures, from their JSON alone."""
