"""Prints the status of a request without a token: `ask.py METHOD URL`."""

import sys
import urllib.error
import urllib.request

method, url = sys.argv[1:]
try:
    with urllib.request.urlopen(
        urllib.request.Request(url, b"" if method == "PUT" else None, method=method)
    ) as answer:
        print(answer.status)
except urllib.error.HTTPError as error:
    print(error.code)
