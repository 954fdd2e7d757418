"""The pages of Spark: batches, fleets, and the jobs that run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..broker.observer import Observer, Unavailable
from ..shell.formats import link
from ..shell.paging import Column, table
from ..shell.shell import Action, NotFoundError, Page, Section, View
from .drivers import ControlServices, Program, amount, count, rows, text, texts, url


@dataclass(frozen=True)
class Job:
    """A job that a batch runs."""

    batch: str
    id: str
    user: str
    what: str
    """Empty if the visitor may not see it."""
    seconds: float
    cancelled: bool
    stages: int
    stages_done: int
    tasks: int
    tasks_done: int
    tasks_failed: int
    rows_read: int
    ui: str

    @property
    def share(self) -> float:
        """The share of its known tasks that is done."""
        return self.tasks_done / self.tasks if self.tasks else 0.0


@dataclass(frozen=True)
class Slot:
    """An executor core that serves requests for a fleet."""

    number: int
    state: str
    host: str
    pid: int
    executor: str
    served: int
    since: float
    """Seconds since 1970; 0 if unknown."""


class SparkSection:
    """The pages of Spark, in the dashboard of a broker."""

    def __init__(self, observer: Observer, controls: ControlServices) -> None:
        self._observer = observer
        self._controls = controls

    def section(self) -> Section:
        """Return what to mount in a shell."""
        return Section(
            pages=[
                Page("/spark", "spark.html", self._overview, "Spark", "k"),
                Page("/spark/batch", "batch.html", self._catalogue, part_of="/spark"),
                Page("/spark/fleet", "fleet.html", self._fleet, part_of="/spark"),
            ],
            actions=[Action("/spark/cancel", self._cancel)],
            version=lambda: self._observer.generation,
            until_changed=self._observer.until_changed,
        )

    async def _overview(self, view: View) -> Mapping[str, Any]:
        programs, more, trouble = await self._controls.try_to_look()
        batches = [each for each in programs if each.status.get("kind") == "batch"]
        fleets = [each for each in programs if each.status.get("kind") == "fleet"]
        known = {each.name for each in (*batches, *fleets)}
        jobs = [job for each in batches for job in _jobs(each, tell=view.visitor.act)]
        columns = [
            Column.text("job", "Job", lambda job: job.id),
            Column.text("batch", "Batch", lambda job: job.batch),
            Column.text("user", "User", lambda job: job.user),
            Column.text("what", "What", lambda job: job.what),
            Column("progress", "Tasks", lambda job: job.share),
            Column("stages", "Stages", lambda job: job.stages_done),
            Column("rows", "Rows read", lambda job: job.rows_read),
            Column("time", "Running for", lambda job: job.seconds),
        ]
        found = table(
            jobs, columns, view.path, view.query, default="-time",
            text=lambda job: f"{job.id} {job.batch} {job.user} {job.what}",
        )  # fmt: skip
        return {
            "trouble": self._observer.trouble or trouble, "table": found, "jobs": len(jobs), "more": more,
            "batches": [_batch(each) for each in batches], "fleets": [_fleet(each) for each in fleets],
            "silent": [each for each in programs if each.name not in known],
            "cancelled": view.query.get("cancelled", ""),
        }  # fmt: skip

    async def _catalogue(self, view: View) -> Mapping[str, Any]:
        name = view.query.get("name", "")
        programs, _, trouble = await self._controls.try_to_look()
        if name not in {each.name for each in programs} and not trouble:
            raise NotFoundError(f"The broker knows no batch {name!r}. Perhaps it has ended.")
        offer: Mapping[str, Any] = {}
        silent = ""
        if not trouble:
            try:
                offer = await self._controls.ask(name, "catalogue")
            except Unavailable as error:
                silent = str(error)
        tables = [(text(row.get("name")), text(row.get("format"))) for row in rows(offer.get("tables"))]
        columns = [
            Column.text("name", "Table", lambda row: row[0]),
            Column.text("format", "Format", lambda row: row[1]),
        ]
        found = table(tables, columns, view.path, view.query, default="name", text=" ".join)
        return {
            "trouble": self._observer.trouble or trouble, "table": found, "name": name, "silent": silent,
            "catalogs": texts(offer.get("catalogs")), "jobs": [_offered(row) for row in rows(offer.get("jobs"))],
        }  # fmt: skip

    async def _fleet(self, view: View) -> Mapping[str, Any]:
        name = view.query.get("name", "")
        programs, _, trouble = await self._controls.try_to_look()
        program = next((each for each in programs if each.name == name), None)
        if program is None and not trouble:
            raise NotFoundError(f"The broker knows no fleet {name!r}. Perhaps it has ended.")
        slots = [] if program is None else list(_slots(program))
        columns = [
            Column("slot", "Slot", lambda slot: slot.number, descending=False),
            Column.text("state", "State", lambda slot: slot.state),
            Column.text("host", "Host", lambda slot: (slot.host, slot.pid)),
            Column("pid", "PID", lambda slot: slot.pid),
            Column.text("executor", "Executor", lambda slot: slot.executor),
            Column("served", "Served", lambda slot: slot.served),
        ]
        found = table(
            slots, columns, view.path, view.query, default="slot",
            text=lambda slot: f"{slot.host} {slot.pid} {slot.executor} {slot.state}",
        )  # fmt: skip
        return {
            "trouble": self._observer.trouble or trouble, "table": found, "name": name,
            "fleet": None if program is None else _fleet(program), "silent": "" if program is None else program.trouble,
        }  # fmt: skip

    async def _cancel(self, fields: Mapping[str, str]) -> str:
        batch, job = fields.get("batch", ""), fields.get("job", "")
        try:
            programs, _ = await self._controls.look()
            if batch not in {each.name for each in programs}:
                raise Unavailable("no such batch")
            answer = await self._controls.ask(batch, "cancel", job=job)
            outcome = "yes" if answer.get("cancelled") is True else "no"
        except Unavailable:
            outcome = "unavailable"
        self._controls.refresh()
        self._observer.refresh()
        return link("/spark", cancelled=outcome)


def _batch(program: Program) -> dict[str, Any]:
    status = program.status
    return {
        **_common(program), "services": texts(status.get("services")),
        "running": sum(1 for _ in rows(status.get("running"))), "done": count(status.get("done")),
        "failed": count(status.get("failed")),
        "cancelled": count(status.get("cancelled")), "tables": len(texts(status.get("tables"))),
        "jobs": len(texts(status.get("jobs"))),
    }  # fmt: skip


def _offered(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a job that callers may run: its name, its parameters, and the first line of its docstring."""
    about = row.get("description")
    return {
        "name": text(row.get("name")), "parameters": text(row.get("parameters")),
        "about": text(about.partition("\n")[0]) if isinstance(about, str) else "",
    }  # fmt: skip


def _fleet(program: Program) -> dict[str, Any]:
    status = program.status
    slots = list(_slots(program))
    return {
        **_common(program), "service": text(status.get("service")), "handler": text(status.get("handler")),
        "slots": len(slots), "serving": sum(each.state == "serving" for each in slots),
        "wanted": count(status.get("wanted")), "min": count(status.get("min")), "max": count(status.get("max")),
        "queued": count(status.get("queued")), "served": sum(each.served for each in slots),
        "last_error": text(status.get("last_error")),
    }  # fmt: skip


def _common(program: Program) -> dict[str, Any]:
    status = program.status
    return {
        "name": program.name, "master": text(status.get("master")), "draining": status.get("draining") is True,
        "ui": url(status.get("ui")), "trouble": program.trouble,
    }  # fmt: skip


def _jobs(program: Program, *, tell: bool) -> Iterator[Job]:
    """Yield the jobs of a batch.  Only visitors who may act see what a job does, as with `mdp-spark status`."""
    for row in rows(program.status.get("running")):
        yield Job(
            program.name, text(row.get("job")), text(row.get("user")), text(row.get("what")) if tell else "",
            amount(row.get("seconds")), text(row.get("state")) == "cancelling", count(row.get("stages")),
            count(row.get("stages_done")), count(row.get("tasks")), count(row.get("tasks_done")),
            count(row.get("tasks_failed")), count(row.get("rows_read")), url(row.get("ui")),
        )  # fmt: skip


def _slots(program: Program) -> Iterator[Slot]:
    for row in rows(program.status.get("slots")):
        yield Slot(
            count(row.get("slot")), text(row.get("state")), text(row.get("host")), count(row.get("pid")),
            text(row.get("executor")), count(row.get("served")), amount(row.get("since")),
        )  # fmt: skip
