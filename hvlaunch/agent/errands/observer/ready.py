"""Readiness of a service on this host: its port takes a connection, or its URL answers without an error."""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.error
import urllib.request

from hvlaunch.agent.facts import interface_addresses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

__all__ = ["answer"]

_PATIENCE = 3.0
_MOST_ADDRESSES = 16
_LONGEST = 200


def answer(question: Dict[str, Any]) -> Dict[str, Any]:
    """Return whether the service of the question is ready, and if not, why."""
    problem = _of_url(question["url"]) if question["url"] else _of_port(question["port"])
    return {"is_ready": problem is None, "problem": problem and problem[:_LONGEST]}


def _of_port(port: int) -> Optional[str]:
    # A server may listen on one of the host's addresses alone.
    addresses: List[str] = ["127.0.0.1", "::1"]
    for listed in interface_addresses().values():
        addresses += [address for address in listed if address not in addresses]
    for address in addresses[:_MOST_ADDRESSES]:
        try:
            socket.create_connection((address, port), _PATIENCE).close()
        except OSError:
            continue
        return None
    return "nothing listens on port %d" % port


def _of_url(url: str) -> Optional[str]:
    # The host's own service: neither a proxy nor a certificate for another name may stand between.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        opener.open(url, timeout=_PATIENCE).close()
    except urllib.error.HTTPError as error:
        return "%s answers %d" % (url, error.code)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return "%s: %s" % (url, getattr(error, "reason", error))
    return None
