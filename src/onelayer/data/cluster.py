"""Connections to a Dask cluster, by the address of its scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

_PATIENCE = 10  # seconds in which a scheduler has to answer


def connect(address: str) -> Any:
    """A client of the cluster at an address such as tcp://scheduler:8786, which has workers."""
    try:
        from distributed import Client
        from distributed.comm.addressing import parse_address, parse_host_port
    except ImportError as error:
        raise ImportError(
            "a cluster needs dask and distributed, which are not installed: "
            "pip install 'onelayer[cluster]'"
        ) from error
    try:
        protocol, location = parse_address(address)
        if protocol in ("tcp", "tls"):  # a client without a port would be hard to end
            parse_host_port(location)
        # One that is the default from the start remains so if nobody answers, and all fails then.
        client = Client(address, timeout=_PATIENCE, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise OSError(f"no Dask scheduler answers at {address}: {error}") from error
    if not client.nthreads():
        client.close()
        raise OSError(f"the Dask cluster at {address} has no workers, expected at least one")
    return client


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Work on Dask arrays is done there while the context lasts; if it gives up, an OSError."""
    client = connect(address)
    from distributed import KilledWorker

    try:
        with client.as_current():
            yield
    except (KilledWorker, CancelledError) as error:
        raise OSError(f"the Dask cluster at {address} gave up: {error}") from error
    finally:
        client.close()
