"""Something leaves a rank between two collectives: it ends, and so does the job; the other ranks wait for ever."""

import pytest
from problem import Linear, distribute, ours

from hvd_dyncomp.exchange.messages import Messages


def test_the_job_ends(rank, monkeypatch):
    def interrupted(self, phase):
        raise KeyboardInterrupt

    model = Linear()
    optimizer = distribute(model, ours(4))
    model(0).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1:
        monkeypatch.setattr(Messages, "name", interrupted)
    model(1).backward()
    if rank == 0:
        optimizer.step()
    else:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        raise SystemExit("rank 1 ends")
