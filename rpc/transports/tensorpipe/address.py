"""What a TensorPipe transport tells the others, so that they can reach it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rpc.devices import DeviceInfo


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach one worker.

    Args:
        url: where torch's agent listens.
        devices: its devices and device maps.
        life: what is named to it when a pipe is to be replaced, to show that this very
            transport is meant; empty if its pipes are not replaced.
        host: from :func:`~rpc.transports.host.identity.host_identity`, if it takes shared memory
            from workers that say the same; empty if it takes none.
    """

    url: str
    devices: DeviceInfo
    life: str
    host: str

    def encode(self) -> bytes:
        """To be published."""
        devices = self.devices.to_json()
        fields = {"url": self.url, "devices": devices, "life": self.life, "host": self.host}
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """The inverse of ``encode``."""
        fields = json.loads(data)
        devices = DeviceInfo.from_json(fields["devices"])
        return cls(fields["url"], devices, fields["life"], fields["host"])
