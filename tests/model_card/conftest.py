"""No card is written or read over the network."""

import socket

import pytest


@pytest.fixture
def offline(monkeypatch):
    """Any use of the network fails."""

    def refuse(*args):
        pytest.fail(f"reached for the network: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
