"""What learns while a server serves: two kinds of teachers, and the rules that judge what they taught."""
