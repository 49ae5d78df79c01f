"""Options from files and variables; docs/reference/config.md is for users."""
