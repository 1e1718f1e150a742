"""The routes: those that OpenAI's clients know, those of learning, and those that tell how the server is."""
