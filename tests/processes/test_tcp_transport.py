"""Channels and sums over TCP: several ends in this process, one a thread, and one in each of several processes where some fail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.tcp_way import Sending
from tests.processes.process_ends import Make
from tests.processes.transport_contract import Connect, TransportContract, together


class TestChannelsOverTcp(TransportContract):
    @pytest.fixture(params=[True, False], ids=["scheduled", "unscheduled"])
    def connect(self, make: Make, request: pytest.FixtureRequest) -> Connect:
        sending = Sending(scheduled=request.param)

        def connected(num_devices: int = 2, *, timeout_s: float = 20.0) -> Sequence[ProcessTransport]:
            settings = {"timeout_s": timeout_s, "connect_timeout_s": 20.0, "sending": sending}
            ends = [make(device, num_devices, **settings) for device in range(num_devices)]
            together(*(end.connect for end in ends))
            return ends

        return connected
