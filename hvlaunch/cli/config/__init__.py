"""Options from elsewhere than the command line: files and variables. docs/config.md is for users."""
