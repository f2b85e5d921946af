"""This machine's address in the network."""

import socket

_ANYWHERE = "192.0.2.1"  # reserved for documentation: no machine has it


def own_address(towards: str = _ANYWHERE) -> str:
    """The address from which packets to `towards` would leave. Nothing is sent.

    On Debian and Ubuntu `gethostbyname(gethostname())` is 127.0.1.1, which others cannot reach.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 1))
            return str(probe.getsockname()[0])
        except OSError:  # a machine without a network
            return "127.0.0.1"
