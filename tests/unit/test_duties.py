"""The leader's duties never write without a term, whenever the lease runs out."""

import pytest

from scriptdispatch.clock import SystemClock
from scriptdispatch.domain.model import NodeRecord
from scriptdispatch.errors import StaleTerm
from scriptdispatch.master.duties import Duties
from scriptdispatch.master.leader import Leadership
from scriptdispatch.master.recovery import Rescuer
from scriptdispatch.services.closing import Closing
from scriptdispatch.services.reconcile import Reconciler
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import make

TTL_S = 10.0


class Later(SystemClock):
    """Real time, some seconds ahead."""

    ahead_s = 0.0

    def uptime(self) -> float:
        return super().uptime() + self.ahead_s


@pytest.mark.parametrize("duty", ["take_office", "check", "time_out", "reconcile", "full_check", "bury_nodes"])
async def test_a_duty_in_which_the_lease_runs_out_is_refused_instead_of_going_on_without_a_term(duty: str) -> None:
    clock, settings = Later(), Settings(store_url="memory://")
    backends = make(settings, clock)
    closing = Closing(backends, settings, role="master")
    leadership = Leadership(backends.leases, backends.events, clock, "me", TTL_S)
    duties = Duties(
        backends, settings, leadership, Reconciler(backends, settings, closing), Rescuer(backends, closing), lambda _: None
    )
    now = clock.now()
    dead = NodeRecord(
        id="other", name="other", pid=1, version="0", started_at=now, last_heartbeat_at=now, workers=[], consumers=0
    )
    await backends.leases.beat(dead, 0)
    assert await leadership.renew()
    await getattr(duties, duty)()
    clock.ahead_s = TTL_S  # stopped for that long, in the middle of the next one
    with pytest.raises(StaleTerm):
        await getattr(duties, duty)()
