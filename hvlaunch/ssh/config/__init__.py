"""The user's ssh configuration: settings, jump hosts, and questions to the ssh binary."""
