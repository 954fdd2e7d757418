"""Django's tasks through Titanic, with a project of Django and its database."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp import Client, Service, ServiceError, Titanic
from zmdp.clients import SettingError
from zmdp.testing import running_broker, running_titanic
from zmdp.titanic import TitanicError, enqueue
from zmdp.titanic.api.submission import new_uuid
from zmdp.titanic.db import schema
from zmdp.titanic.operator import admin
from zmdp.workers import Worker

django = pytest.importorskip("django", reason="needs Django: pip install django django-tasks")
if django.VERSION < (6,):
    pytest.importorskip("django_tasks", reason="needs the tasks of Django: pip install django-tasks")

SHORT = timedelta(hours=1)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The project, set up in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_SETTINGS_MODULE", "support.shop.settings")
        patch.setenv("SHOP_DB", str(tmp_path_factory.mktemp("shop") / "shop.db"))
        django.setup()
        yield


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def shop(request, project):
    """The project with its database: what the tests use, in one namespace."""
    from django.core.management import call_command
    from django.db import connections, transaction
    from support.shop import models, tasks

    from zmdp.titanic.contrib import django as titanic_django

    default = dict(connections.databases["default"])
    if request.param == "postgresql":
        cluster = request.getfixturevalue("cluster")
        cluster.execute("CREATE DATABASE shop")
        url = sa.make_url(cluster.url("shop"))
        given = {"NAME": "shop", "USER": url.username, "PASSWORD": url.password or "", "PORT": url.port or ""}
        host = url.host or url.query["host"]
        connections["default"].close()
        connections.databases["default"].update(given, ENGINE="django.db.backends.postgresql", HOST=host, OPTIONS={})
        del connections["default"]
        url = url.render_as_string(hide_password=False)
    else:
        url = f"sqlite:///{default['NAME']}"
    engine = schema.open_engine(schema.database_url(url), create=True)
    schema.upgrade(engine)
    engine.dispose()
    call_command("migrate", run_syncdb=True, verbosity=0)

    with running_broker() as server, running_titanic(server.endpoints[0], url):
        services = titanic_django.task_services()
        names = [each.name for each in services if each.name != "django.idle"]
        worker = services.worker(broker=server.endpoints[0], only=names)
        thread = threading.Thread(target=lambda: asyncio.run(worker.run()), daemon=True)
        thread.start()
        try:
            found = {**vars(tasks), **vars(models)}
            yield SimpleNamespace(
                **found, atomic=transaction.atomic, endpoint=server.endpoints[0], module=titanic_django
            )
        finally:
            worker.stop()
            thread.join()
    connections.close_all()
    connections.databases["default"].clear()
    connections.databases["default"].update(default)
    del connections["default"]


def finished(result):
    """Wait until a task has ended, and return its result."""
    eventually(lambda: result.refresh() or result.is_finished)
    return result


def row(shop, result):
    """Return Titanic's request for a task."""
    with shop.module.connection_to() as connection:
        return admin.show(connection, UUID(result.id))


def test_a_task_runs_and_its_result_is_kept(shop):
    result = shop.add.enqueue(1, b=2)
    assert (result.args, result.kwargs, result.attempts) == ([1], {"b": 2}, 0)
    assert finished(result).return_value == 3
    assert result.status == "SUCCESSFUL"
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert (result.last_attempted_at, result.attempts) == (result.started_at, 1)
    again = shop.add.get_result(result.id)
    assert again == result
    assert (again.task.func, again.task.queue_name) == (shop.add.func, "default")
    assert row(shop, result)["result_ttl"] == 7 * 86400


def test_a_task_and_an_order_are_committed_together(shop):
    from django.db import connection

    before = shop.Order.objects.count()
    with shop.atomic():
        shop.Order.objects.create(number=1)
        result = shop.count_orders.enqueue("default")
        assert shop.count_orders.get_result(result.id).status == "READY"
        assert connection.in_atomic_block
    assert finished(result).return_value == before + 1


def test_a_task_is_rolled_back_with_its_transaction(shop):
    from django.db import transaction

    with shop.atomic():
        rolled_back = shop.add.enqueue(1)
        transaction.set_rollback(True)
    with pytest.raises(missing(shop), match=rolled_back.id):
        shop.add.get_result(rolled_back.id)
    with shop.atomic():
        kept = shop.add.enqueue(2)
        with shop.atomic():
            undone = shop.add.enqueue(3)
            transaction.set_rollback(True)
    assert finished(kept).return_value == 2
    with pytest.raises(missing(shop)):
        shop.add.get_result(undone.id)


def missing(shop):
    return shop.module.TaskResultDoesNotExist


def test_results_that_do_not_exist(shop):
    for unknown in (new_uuid().hex, "no uuid"):
        with pytest.raises(missing(shop), match=unknown):
            shop.add.get_result(unknown)
    with shop.module.connection_to() as connection:
        uuid = enqueue(connection, "echo", b"not a task")
    with pytest.raises(missing(shop)):
        shop.add.get_result(uuid)
    with pytest.raises(Exception, match="Task does not match"):
        shop.fail.get_result(shop.add.enqueue(1).id)


def test_urgent_tasks_run_first(shop):
    shop.began.clear()
    with shop.atomic():
        results = [shop.record.using(priority=priority).enqueue(priority) for priority in (0, -100, 100, 50)]
    for result in results:
        finished(result)
    assert shop.began == [100, 50, 0, -100]
    assert [row(shop, result)["priority"] for result in results] == [4, 0, 9, 6]
    assert [shop.record.get_result(result.id).task.priority for result in results] == [0, -100, 100, 50]


def test_a_task_can_run_later(shop):
    from django.test.utils import override_settings

    at = datetime.now(UTC) + SHORT
    result = shop.add.using(run_after=at).enqueue(1)
    result.refresh()
    assert (result.status, result.started_at) == ("READY", None)
    assert row(shop, result)["state"] == "delayed"
    assert row(shop, result)["due"] == pytest.approx(at.timestamp())
    assert shop.add.get_result(result.id).task.run_after == at
    with override_settings(USE_TZ=False, TIME_ZONE="Europe/Paris"):
        naive = shop.add.using(run_after=datetime(2100, 1, 1)).enqueue(1)
        assert shop.add.get_result(naive.id).enqueued_at.tzinfo is None
    assert row(shop, naive)["due"] == datetime(2099, 12, 31, 23, tzinfo=UTC).timestamp()
    now = shop.add.using(run_after=datetime.now(UTC) - SHORT).enqueue(5)
    assert finished(now).return_value == 5


def test_a_task_that_fails(shop):
    result = finished(shop.fail.enqueue("no such thing"))
    assert result.status == "FAILED"
    (error,) = result.errors
    assert error.exception_class is LookupError
    assert "raise LookupError(text)\nLookupError: no such thing" in error.traceback
    with pytest.raises(ValueError, match="Task failed"):
        result.return_value  # noqa: B018
    assert finished(shop.return_object.enqueue()).errors[0].exception_class is TypeError
    with pytest.raises(TypeError, match="Unsupported type"):
        shop.add.enqueue(object())


def test_a_task_that_an_operator_cancels(shop):
    result = shop.later.enqueue(1)
    with shop.module.connection_to() as connection:
        admin.cancel(connection, [UUID(result.id)], 1.0)
    (error,) = finished(result).errors
    assert error.exception_class.__name__ == "ServiceError"
    assert error.traceback == "499 cancelled by an operator"


def test_a_task_whose_function_is_gone_or_is_not_a_task(shop):
    result = shop.add.enqueue(1)
    request = shop.module.TaskRequest("support.shop.tasks.not_a_task", [], {}, "default", "default", 0)
    with pytest.raises(ImportError, match="not_a_task is not a task"):
        request.task()
    assert finished(result).is_finished


def test_only_what_titanic_runs_is_run(shop):
    shop.began.clear()
    result = finished(shop.record.enqueue("once"))
    request = shop.module.TaskRequest("support.shop.tasks.record", ["once"], {}, "default", "default", 0)
    service = Service("django.default", shop.module.TaskRequest)
    with Client(shop.endpoint, timeout=TIMEOUT_SECONDS) as client:
        with pytest.raises(ServiceError, match="is SUCCESSFUL, so it is not run"):
            client.call(service, request, headers={"request-id": result.id})
        with pytest.raises(ServiceError, match="TaskResultDoesNotExist"):
            client.call(service, request)
    assert shop.began == ["once"]


def test_a_task_is_retried_and_knows_its_attempt(shop):
    result = shop.succeed_at.enqueue(2)
    assert finished(result).return_value == result.id
    assert (result.attempts, result.worker_ids) == (2, ["retrying.default"] * 2)
    assert (row(shop, result)["result_ttl"], row(shop, result)["group_name"]) == (None, "tenant-7")
    assert finished(shop.succeed_at.enqueue(4)).status == "FAILED"


def test_asyncio(shop):
    from asgiref.sync import sync_to_async
    from django.db import connections

    async def main():
        result = await shop.double.aenqueue(4)
        while not result.is_finished:
            await asyncio.sleep(0.01)
            await result.arefresh()
        assert (await shop.double.aget_result(result.id)).return_value == 8
        await sync_to_async(leave)()

    def leave():
        """Forget the connection of asyncio's thread: the next database is another one."""
        connections["default"].close()
        del connections["default"]

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_SECONDS))


def test_signals(shop):
    seen = []

    def receive(sender, task_result, signal, **_):
        assert sender is shop.module.TitanicBackend
        seen.append((names[signal], task_result.id, str(task_result.status)))

    names = {getattr(shop.module, f"task_{name}"): name for name in ("enqueued", "started", "finished")}
    for signal in names:
        signal.connect(receive)
    try:
        good, bad = finished(shop.add.enqueue(1)), finished(shop.fail.enqueue(""))
    finally:
        for signal in names:
            signal.disconnect(receive)
    for result, end in ((good, "SUCCESSFUL"), (bad, "FAILED")):
        told = [(name, status) for name, uuid, status in seen if uuid == result.id]
        assert told == [("enqueued", "READY"), ("started", "RUNNING"), ("finished", end)]


def test_any_request_can_be_part_of_a_transaction_of_django(shop):
    with Worker("echo", list, broker=shop.endpoint), Client(shop.endpoint, timeout=TIMEOUT_SECONDS) as client:
        with shop.atomic(), shop.module.connection_to() as connection:
            shop.Order.objects.create(number=2)
            uuid = enqueue(connection, Service("echo", str, str), "hello", key=f"order-{shop.endpoint}")
            assert uuid == enqueue(connection, "echo", b"again", key=f"order-{shop.endpoint}")
        assert Titanic(client).ticket(uuid, Service("echo", str, str)).result(TIMEOUT_SECONDS) == "hello"


def test_a_key_is_not_stored_without_its_request(shop, monkeypatch):
    def broken(*_):
        raise RuntimeError("the power fails")

    with monkeypatch.context() as patch:
        patch.setattr("zmdp.titanic.db.store.acceptance._ACCEPT", SimpleNamespace(count=broken))
        with pytest.raises(RuntimeError, match="the power fails"), shop.module.connection_to() as connection:
            enqueue(connection, "nobody", key=f"again-{shop.endpoint}")
    with shop.module.connection_to() as connection:
        uuid = enqueue(connection, "nobody", key=f"again-{shop.endpoint}")
        assert admin.show(connection, UUID(uuid))["state"] == "pending"


def test_errors_of_the_database_are_those_of_django(shop):
    from django.db import DatabaseError

    with pytest.raises(DatabaseError), shop.atomic(), shop.module.connection_to() as connection:
        connection.execute(sa.text("SELECT * FROM nowhere"))


def test_a_database_without_titanic_s_tables(project, tmp_path):
    from django.db import connections

    from zmdp.titanic.contrib.django import connection_to

    engine = "django.db.backends.sqlite3"
    connections.databases["empty"] = {
        **connections.databases["default"], "ENGINE": engine, "NAME": str(tmp_path / "empty.db"), "OPTIONS": {}
    }  # fmt: skip
    try:
        with pytest.raises(TitanicError, match="lacks Titanic's tables"), connection_to("empty") as connection:
            enqueue(connection, "echo")
        connections["empty"].vendor = "oracle"
        with pytest.raises(SettingError, match="the database is oracle: Titanic needs SQLite"), connection_to("empty"):
            pass
    finally:
        connections["empty"].close()
        del connections["empty"], connections.databases["empty"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"colour": 1}, "OPTIONS of the task backend 'x': there is no option 'colour': known are database, prefix"),
        ({"key": "k"}, "there is no option 'key'"),
        ({"retries": -1}, "retries must be a whole number"),
    ],
)
def test_invalid_options(project, options, text):
    from zmdp.titanic.contrib.django import TitanicBackend

    with pytest.raises(django.core.exceptions.ImproperlyConfigured, match=text):
        TitanicBackend("x", {"OPTIONS": options})


def test_system_checks(project, monkeypatch):
    from django.db import connections

    from zmdp.titanic.contrib.django import TitanicBackend

    def found(**params):
        return [each.id for each in TitanicBackend("x", params).check()]

    assert found() == []
    assert found(OPTIONS={"database": "nowhere"}) == ["zmdp.E001"]
    monkeypatch.setattr(connections["default"], "vendor", "oracle")
    assert found(QUEUES=[]) == ["zmdp.E002", "zmdp.E003"]


def test_what_mdworker_runs(project):
    from zmdp.titanic.contrib import django as module

    assert [each.name for each in module.tasks] == ["django.default", "django.idle", "retrying.default"]
    with pytest.raises(AttributeError, match="has no attribute 'task'"):
        module.task  # noqa: B018
