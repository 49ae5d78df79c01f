"""What the user sees: workers' output, messages, the failure report."""
