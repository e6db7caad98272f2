"""The address that a TensorPipe transport publishes for the other workers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from rpc.devices import DeviceInfo

_TCP: Final = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)):\d+")


@dataclass(frozen=True, slots=True)
class TensorPipeAddress:
    """The address of one worker.

    Args:
        url: where torch's agent listens.
        devices: its devices and device maps.
        host: from :func:`~rpc.transports.host.identity.host_identity`, if it takes shared memory
            from workers that say the same; empty if it takes none.
    """

    url: str
    devices: DeviceInfo
    host: str

    def encode(self) -> bytes:
        """Returns the address as bytes to publish."""
        fields = {"url": self.url, "devices": self.devices.to_json(), "host": self.host}
        return json.dumps(fields).encode()

    def listens_at(self) -> list[str]:
        """The IP addresses in the URL."""
        return list(dict.fromkeys(v6 or v4 for v6, v4 in _TCP.findall(self.url)))

    @classmethod
    def decode(cls, data: bytes) -> TensorPipeAddress:
        """The inverse of ``encode``."""
        fields = json.loads(data)
        return cls(fields["url"], DeviceInfo.from_json(fields["devices"]), fields["host"])
