"""Options from files and variables; docs/config.md is for users."""
