"""Rows with keys, which clients send through Titanic (`clients/rows`); `rows.py` is the other side."""

from collections.abc import Mapping, Sequence

from ..clients import BrokerUnreachable, Reply, RequestError, ServiceError, ServiceNotFound, WorkerLost
from ..clients.rows import Caller, RowOutcome
from ..clients.rows.calls import read_outcomes
from ..clients.rows.packs import Pack
from ..mdp.codes import Code
from ..mdp.rows import OPTION
from .conversation import REQUEST, no_titanic, raise_for_status


class KeyedRows:
    """Submits rows to Titanic under their keys, which it remembers together with the replies for `keep` seconds.

    The requests are never closed, because the rows may be submitted again, which needs the replies again.
    """

    through = REQUEST
    first_rows = 16  # Titanic answers rows one by one, and so need not be asked whether it understands packs
    max_rows = 128
    max_requests = 16  # more would only wait longer, for the same transactions
    target_seconds = 0.5  # Titanic commits to disk
    retryable: tuple[type[RequestError], ...] = (BrokerUnreachable, ServiceNotFound, WorkerLost)

    def __init__(self, client: Caller, headers: Mapping[str, str] | None, keep: float) -> None:
        self._client = client
        self._headers = headers
        self._kept_ms = round(keep * 1000, 3)

    async def request(self, service: str, pack: Pack, timeout: float) -> Sequence[RowOutcome]:
        """Submit rows and return the outcomes of all, or of the first ones."""
        body = [service.encode()]
        for key, row in zip(pack.keys, pack.rows, strict=True):
            body += (key.encode(errors="surrogateescape"), row)
        options = {OPTION: len(pack), "key_ttl": self._kept_ms, "result_ttl": self._kept_ms}
        try:
            reply = await self._client.request(
                self.through, *body, timeout=timeout, wait=False, headers=self._headers, options=options
            )
        except ServiceNotFound:
            raise no_titanic(self._client, self.through) from None
        outcomes = read_outcomes(reply, len(pack), service, partly=True)
        if outcomes is None:
            raise_for_status(Reply(reply, service=self.through, final=True))
            text = "Titanic does not understand requests with several rows; update it"
            raise ServiceError(Code.FAILED, text, service=self.through)
        return outcomes
