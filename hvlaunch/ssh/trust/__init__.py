"""Who a host is, and who we are: host keys, certificates, our keys and passphrases."""
