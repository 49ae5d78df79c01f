"""The engine: stories told as text, with the actions that it must want."""
