"""Airflow: an operator that runs a query or job of a batch through Titanic; see docs/spark/airflow.md.

Airflow's workers, its triggerer and its DAG processor import it; nothing else in this package needs Airflow.
"""

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

from airflow.configuration import conf
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from ...clients import AsyncClient, Client, Reply
from ...mdp.errors import ServiceError, SettingError, UnknownTicket
from ...titanic import AsyncTicket, AsyncTitanic, Ticket, Titanic
from .frames import difference, job_frames, parse_result, sql_frames
from .job_failed import JobFailed
from .partials import Lines, event_of

KEEP_SECONDS: Final = 30 * 86400.0
"""How long Titanic keeps the request of a task that does not come back for it, and remembers its key."""
MAX_REQUESTS: Final = 1000
"""How often one task instance can fail or be cleared."""
MAX_XCOM_BYTES: Final = 64 << 10
CONNECTION: Final = ("broker", "key", "broker_key")
DEFERRABLE: Final = bool(conf.getboolean("operators", "default_deferrable", fallback=False))


class SparkJobOperator(BaseOperator):  # type: ignore[misc]  # Airflow's types are not known here
    """Runs a query or job of a batch, once, however often Airflow has to start the task.

        report = SparkJobOperator(task_id="report", job="report", arguments={"day": "{{ ds }}"})
        total = SparkJobOperator(task_id="total", sql="SELECT count(*) AS n FROM orders WHERE day = :day",
                                 arguments={"day": "{{ ds }}"}, broker="tcp://broker:5555")

    The request goes to Titanic under a key made of the DAG, run, task and map index, so a retry attaches to a job that
    still runs.  Its XCom is the description of the result with the rows, or the value, as `data`.

    Args:
        sql: A query.
        job: Or the name of a job.
        arguments: The query's parameters, or the job's arguments.
        prefix: The first part of the names of the services, as for `mdp-spark batch --prefix`.
        namespace: The first part of keys, if several Airflows share a Titanic.
        broker: The broker's endpoint; by default that in `$MDP_BROKER`, of the worker.
        key: File with a secret key, for brokers that require one; by default `$MDP_KEY`.
        broker_key: The broker's public key; by default `$MDP_BROKER_KEY`.
        deferrable: Whether to wait in the triggerer, which takes no slot of a worker; by default as configured.
        settings: Those of every operator.

    Raises:
        SettingError: There is not exactly one of `sql` and `job`.
    """

    template_fields: Sequence[str] = (*CONNECTION, "sql", "job", "arguments")
    template_ext = (".sql",)
    template_fields_renderers: Final = {"sql": "sql", "arguments": "json"}

    def __init__(
        self, *, sql: str | None = None, job: str | None = None, arguments: Mapping[str, Any] | None = None,
        prefix: str = "spark", namespace: str = "airflow", broker: str | None = None, key: str | None = None,
        broker_key: str | None = None, deferrable: bool = DEFERRABLE, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(**settings)
        if (sql is None) == (job is None):
            raise SettingError("SparkJobOperator takes either sql, or job")
        self.sql, self.job, self.arguments, self.prefix, self.namespace = sql, job, arguments, prefix, namespace
        self.broker, self.key, self.broker_key, self.deferrable = broker, key, broker_key, deferrable
        self._uuid: str | None = None

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Submit the request, or find that of an earlier try, and return its result."""
        with self.titanic() as titanic:
            ticket = self._submit(titanic, context["ti"])
            self._uuid = ticket.uuid
            self.log.info("request %s; to look at it: mdp-spark status %s", ticket.uuid, ticket.uuid)
            if self.deferrable:
                # Airflow calls `resume`, on another worker, once the triggerer has seen the request end.
                connection = {name: getattr(self, name) for name in CONNECTION}
                trigger = SparkJobTrigger(uuid=ticket.uuid, **connection)
                self.defer(trigger=trigger, method_name="resume", timeout=self.execution_timeout)
            lines = Lines()
            with suppress(ServiceError, UnknownTicket):  # `_result` raises them, too
                for part in ticket.partials():
                    for line, _ in lines.of(event_of(part)):
                        self.log.info("%s", line)
            return self._result(ticket, lines.job)

    def resume(self, context: Mapping[str, Any], event: Mapping[str, str]) -> dict[str, Any]:
        """Return the result once the triggerer has seen the request end."""
        del context
        with self.titanic() as titanic:
            return self._result(titanic.ticket(event["uuid"]), event["job"])

    @contextmanager
    def titanic(self) -> Generator[Titanic]:
        """Connect to Titanic."""
        with Client(self.broker, timeout=60, key=self.key, broker_key=self.broker_key) as client:
            yield Titanic(client)

    def _result(self, ticket: Ticket[Reply, Reply], job: str) -> dict[str, Any]:
        """Return the result of a request that has ended, for XCom; close the request.

        An error that a retry cannot help (422) is an `AirflowFailException`.
        """
        try:
            described, data = parse_result(ticket.result())
        except UnknownTicket:
            raise AirflowException(f"request {ticket.uuid} was cancelled, or its result has expired") from None
        except ServiceError as error:
            ticket.close()
            kind = AirflowFailException if error.code == 422 else AirflowException
            raise kind(str(JobFailed.of(error, job=job, query=self.sql or ""))) from None
        ticket.close()
        described["data"] = json.loads(data) if data and len(data) <= MAX_XCOM_BYTES else None
        if len(data) > MAX_XCOM_BYTES:
            self.log.warning("the result has %d bytes: too many for XCom, which gets its description", len(data))
        return described

    def _submit(self, titanic: Titanic, instance: Any) -> Ticket[Reply, Reply]:
        """Return the request of this task instance that has not been closed: its task has not been told its end.

        A request that fails, succeeds or is killed is closed.  So a retry, or a cleared task, finds no open request and
        submits the next one; and there are never two at a time.
        """
        names = (instance.dag_id, instance.run_id, instance.task_id, instance.map_index)
        digest = hashlib.sha256("\0".join(map(str, names)).encode()).hexdigest()  # names may be longer than a key
        if self.sql is not None:
            service, frames = "sql", sql_frames(self.sql, self.arguments, "json")
        else:
            service, frames = "job", job_frames(str(self.job), self.arguments or {}, "json")
        for number in range(1, MAX_REQUESTS + 1):
            ticket = titanic.submit(
                f"{self.prefix}.{service}", *frames, key=f"{self.namespace}/{digest}/{number}",
                key_ttl=KEEP_SECONDS, ttl=KEEP_SECONDS,
            )  # fmt: skip
            try:
                differs = difference(ticket, frames)
            except UnknownTicket:
                continue
            if not differs:
                return ticket
            self.log.warning("request %s of an earlier try is cancelled, for it differs: %s", ticket.uuid, differs)
            ticket.close()
        raise AirflowFailException(f"this task instance has had {MAX_REQUESTS} requests; start a new run instead")

    def on_kill(self) -> None:
        """Cancel the job: the task was marked, cleared or has timed out."""
        if self._uuid is not None:
            with self.titanic() as titanic:
                titanic.ticket(self._uuid).close()
            self.log.info("request %s was cancelled", self._uuid)


class SparkJobTrigger(BaseTrigger):  # type: ignore[misc]
    """Waits for a request in the triggerer, and logs its progress."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return how the triggerer makes this trigger."""
        return f"{__name__}.{type(self).__name__}", self.settings

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event, once the request has ended or failed: the task then asks for its result."""
        lines = Lines()
        async with self._ticket() as ticket:
            with suppress(ServiceError, UnknownTicket):
                async for part in ticket.partials():
                    for line, _ in lines.of(event_of(part)):
                        self.log.info("%s", line)
        yield TriggerEvent({"uuid": self.settings["uuid"], "job": lines.job})

    async def on_kill(self) -> None:
        """Cancel the job: the task was marked or cleared."""
        async with self._ticket() as ticket:
            await ticket.close()

    @asynccontextmanager
    async def _ticket(self) -> AsyncGenerator[AsyncTicket[Reply, Reply]]:
        connection = {name: self.settings[name] for name in CONNECTION}
        async with AsyncClient(timeout=60, **connection) as client:
            yield AsyncTitanic(client).ticket(self.settings["uuid"])
