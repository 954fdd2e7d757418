"""Django's tasks through Titanic: a backend for `django.tasks`, or before Django 6 for `django_tasks`.

    TASKS = {"default": {"BACKEND": "zmdp.titanic.contrib.django.TitanicBackend"}}    # settings.py

    $ DJANGO_SETTINGS_MODULE=shop.settings mdworker zmdp.titanic.contrib.django:tasks

A task is a request of the service `django.QUEUE`.  It is stored over Django's own connection to a database that has
Titanic's tables, so it is part of the transaction of whoever enqueues it.  See docs/how-to/django.md.
"""

import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, Unpack

import django
import msgspec
from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connections, transaction
from django.utils import timezone
from django.utils.module_loading import import_string
from sqlalchemy.engine import Connection, Engine, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from ...mdp.codes import Code
from ...mdp.errors import ServiceError, SettingError
from ...mdp.services import Service
from ...mdp.services.submission import MAX_PRIORITY
from ...mdp.tracing import REQUEST_ID
from ...workers import current_request
from ...workers.services import Services
from ...workers.services.offered import ServiceSettings
from ..api.submission import encode_options, read_uuid, unpack
from ..db.enqueue import enqueue
from ..operator import admin

try:
    from django.tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TASK_MAX_PRIORITY, TASK_MIN_PRIORITY, Task, TaskError
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ImportError:
    from django_tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import TASK_MAX_PRIORITY, TASK_MIN_PRIORITY, Task, TaskError
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

DEFAULT_TTL_SECONDS: Final = 7 * 86400.0
"""How long results are kept by default: nothing in Django's API deletes them."""
_SUBMISSION: Final = ("group", "retries", "backoff", "ttl")
"""The options of a submission that `OPTIONS` can set."""
_STATUS: Final = {
    "running": TaskResultStatus.RUNNING, "done": TaskResultStatus.SUCCESSFUL, "failed": TaskResultStatus.FAILED,
}  # fmt: skip


@dataclass(frozen=True)
class TaskRequest:
    """What is sent for a task: its function, by its path, and everything that can differ from call to call."""

    function: str
    args: list[Any]
    kwargs: dict[str, Any]
    backend: str
    queue_name: str
    priority: int
    run_after: datetime | None = None

    def task(self) -> Task:
        """Return the task.  Raises `ImportError` if its function is not there, or is not a task."""
        task: Any = import_string(self.function)
        if not isinstance(task, Task):
            raise ImportError(f"{self.function} is not a task")
        return task.using(
            backend=self.backend, queue_name=self.queue_name, priority=self.priority, run_after=self.run_after
        )


class TitanicBackend(BaseTaskBackend):  # type: ignore[misc]  # Django has no types
    """Stores tasks as requests to Titanic.

    `OPTIONS` may have:
        `database`: The alias, in `DATABASES`, of the database with Titanic's tables (default: `"default"`).
        `prefix`: What comes before a queue's name in the name of its service (default: `"django."`).
        `owner`: As for `enqueue`.
        `group`, `retries`, `backoff`, `ttl`: As for `Titanic.submit`; the result of a task is kept for a week by
            default.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        options = dict(self.options)
        self.database: str = options.pop("database", "default")
        self.prefix: str = options.pop("prefix", "django.")
        self.owner: str | None = options.pop("owner", None)
        self.submission: Any = {"ttl": DEFAULT_TTL_SECONDS, **options}
        try:
            if unknown := options.keys() - set(_SUBMISSION):
                known = ", ".join(("database", "prefix", "owner", *_SUBMISSION))
                raise SettingError(f"there is no option {min(unknown)!r}: known are {known}")
            encode_options(self.submission)
        except SettingError as error:
            raise ImproperlyConfigured(f"OPTIONS of the task backend {alias!r}: {error}") from None

    def services(self) -> Iterator[Service[TaskRequest, Any]]:
        """Yield the service of each queue."""
        for queue in sorted(self.queues):
            yield _service(self.prefix + queue)

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Return what is wrong with the settings, for Django's system checks."""
        found = []
        if self.database not in connections:
            found.append(Error(f"there is no database {self.database!r} in DATABASES", id="zmdp.E001"))
        elif connections[self.database].vendor not in {"sqlite", "postgresql"}:
            found.append(Error(f"the database {self.database!r} is neither SQLite nor PostgreSQL", id="zmdp.E002"))
        if not self.queues:
            found.append(Error(f"QUEUES of the task backend {self.alias!r} must name its queues", id="zmdp.E003"))
        return found

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Store a task.  In a transaction of its database, it is stored if that commits."""
        self.validate_task(task)
        result = TaskResult(
            task=task, id="", status=TaskResultStatus.READY, enqueued_at=timezone.now(), started_at=None,
            finished_at=None, last_attempted_at=None, args=args, kwargs=kwargs, backend=self.alias, errors=[],
            worker_ids=[],
        )  # fmt: skip
        request = TaskRequest(
            task.module_path, result.args, result.kwargs, self.alias, task.queue_name, task.priority, task.run_after
        )
        run_after = task.run_after
        if run_after is not None and timezone.is_naive(run_after):
            run_after = timezone.make_aware(run_after)
        with _borrowed(self.database) as connection:
            uuid = enqueue(
                connection, _service(self.prefix + task.queue_name), request, owner=self.owner, at=run_after,
                priority=_priority(task.priority), **self.submission,
            )  # fmt: skip
        result = replace(result, id=uuid)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """Return the task and what has become of it.  Raises `TaskResultDoesNotExist`."""
        uuid = read_uuid(result_id)
        row = None
        if uuid is not None:
            with _borrowed(self.database) as connection:
                row = admin.show(connection, uuid)
        if row is None or not row["service"].startswith(self.prefix):
            raise TaskResultDoesNotExist(result_id)
        return self._result(row)

    def _result(self, row: Mapping[str, Any]) -> TaskResult:
        service, state = _service(row["service"]), row["state"]
        request: TaskRequest = service.request.decode(unpack(row["body"]))
        started = _time(row["started"])
        result = TaskResult(
            task=request.task(), id=row["uuid"], status=_STATUS.get(state, TaskResultStatus.READY),
            enqueued_at=_time(row["created"]), started_at=started, finished_at=_time(row["finished"]),
            last_attempted_at=started, args=request.args, kwargs=request.kwargs, backend=self.alias,
            errors=[_error(row)] if state == "failed" else [], worker_ids=[service.name] * row["attempts"],
        )  # fmt: skip
        if state == "done":
            _set(result, _return_value=service.reply.decode(unpack(row["reply"])))
        return result

    def run(self, result_id: str) -> Any:
        """Run a task that Titanic has sent, and return what it returns.  Raises `ServiceError` if it fails."""
        result = self.get_result(result_id)
        if result.status != TaskResultStatus.RUNNING:  # it was cancelled, or is another attempt's by now
            raise ServiceError(Code.CANCELLED, f"the task {result_id} is {result.status}, so it is not run")
        task_started.send(type(self), task_result=result)
        context = [TaskContext(task_result=result)] if result.task.takes_context else []
        try:
            value = normalize_json(result.task.call(*context, *result.args, **result.kwargs))
        except Exception as error:
            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            told = TaskError(exception_class_path=kind, traceback="".join(traceback.format_exception(error)))
            _set(result, status=TaskResultStatus.FAILED, finished_at=timezone.now(), errors=[told])
            task_finished.send(type(self), task_result=result)  # here, because its receivers may log the exception
            raise ServiceError(Code.FAILED, f"{kind}: {error}", msgspec.json.encode(told)) from error
        _set(result, status=TaskResultStatus.SUCCESSFUL, finished_at=timezone.now(), _return_value=value)
        task_finished.send(type(self), task_result=result)
        return value


@cache
def _service(name: str) -> Service[TaskRequest, Any]:
    return Service(name, TaskRequest)


def _priority(priority: int) -> int:
    """Return the priority of a request for one of a task: several of Django's 201 are one of Titanic's 10."""
    return (priority - TASK_MIN_PRIORITY) * MAX_PRIORITY // (TASK_MAX_PRIORITY - TASK_MIN_PRIORITY)  # type: ignore[no-any-return]


def _time(seconds: float | None) -> datetime | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC if settings.USE_TZ else None)


def _error(row: Mapping[str, Any]) -> TaskError:
    """Return why a task has failed: its exception, or the error with which Titanic has ended it."""
    if row["reply"] is not None:
        (detail,) = unpack(row["reply"])
        return TaskError(**msgspec.json.decode(detail))
    kind = f"{ServiceError.__module__}.{ServiceError.__qualname__}"
    return TaskError(exception_class_path=kind, traceback=f"{row['code']} {row['error']}")


def _set(result: TaskResult, **fields: Any) -> None:
    """Change a result, as Django's own backends do."""
    for name, value in fields.items():
        object.__setattr__(result, name, value)


# ── running tasks ────────────────────────────────────────────────────────────────────────────────────────────────────


def run_task(request: TaskRequest) -> Any:
    """Handle a request: run its task."""
    close_old_connections()
    try:
        return task_backends[request.backend].run(current_request().headers.get(REQUEST_ID, ""))
    finally:
        close_old_connections()


def task_services(**defaults: Unpack[ServiceSettings]) -> Services:
    """Return the services that run the tasks: one for each queue of each `TitanicBackend`.

    `defaults` are those of `Services`.
    """
    django.setup()
    backends = [each for each in task_backends.all() if isinstance(each, TitanicBackend)]
    services = Services(**defaults)
    for name in sorted({service.name for backend in backends for service in backend.services()}):
        services.service(name)(run_task)
    return services


def __getattr__(name: str) -> Any:
    if name != "tasks":  # what `mdworker` runs; programs that only enqueue do without
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return task_services()


# ── Django's connections ─────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def connection_to(alias: str = "default") -> Generator[Connection]:
    """Open a SQLAlchemy connection over Django's to the database `alias`, for `enqueue`.

    What is executed is part of the current `transaction.atomic()`, or without one, a transaction of its own.

    Raises Django's own exceptions for errors of the database.
    """
    with transaction.atomic(alias), _borrowed(alias) as connection:  # a request and its key are stored together
        yield connection


@contextmanager
def _borrowed(alias: str) -> Generator[Connection]:
    """Open such a connection without a transaction: Django alone begins and ends them."""
    wrapper = connections[alias]
    wrapper.ensure_connection()
    engine = _engine(alias, wrapper.vendor, wrapper.Database.__name__)
    with wrapper.wrap_database_errors, engine.connect() as connection:
        try:
            yield connection
        except DBAPIError as error:
            raise (error.orig or error) from None


class _Borrowed:
    """Django's connection, as SQLAlchemy uses a driver's."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper.connection, name)

    def cursor(self) -> Any:
        """Return a cursor of the driver: Django's own understands other placeholders."""
        return self._wrapper.cursor().cursor

    def commit(self) -> None:
        """Do nothing: Django commits."""

    def rollback(self) -> None:
        """Do nothing: Django rolls back."""

    def close(self) -> None:
        """Do nothing: Django keeps the connection."""


@cache
def _engine(alias: str, vendor: str, driver: str) -> Engine:
    """Return what keeps the compiled statements for a database.  Raises `SettingError` if Titanic cannot use it."""
    if vendor not in {"sqlite", "postgresql"}:
        raise SettingError(f"the database is {vendor}: Titanic needs SQLite or PostgreSQL")
    url = make_url("sqlite://" if vendor == "sqlite" else f"postgresql+{driver}://")
    kind = url.get_dialect()
    dialect = kind(dbapi=kind.import_dbapi())  # type: ignore[call-arg]  # as all of SQLAlchemy's own take it
    pool = NullPool(lambda: _Borrowed(connections[alias]), dialect=dialect, reset_on_return=None)
    return Engine(pool, dialect, url)
