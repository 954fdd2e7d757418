try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

from .models import Order

began = []
"""The arguments of `record`, in the order in which it was called."""


@task
def add(a, b=0):
    return a + b


@task
def record(name):
    began.append(name)


@task
def count_orders(database):
    return Order.objects.using(database).count()


@task
def fail(text):
    raise LookupError(text)


@task(takes_context=True, backend="retrying")
def succeed_at(context, attempt):
    if context.attempt < attempt:
        raise RuntimeError("not yet")
    return context.task_result.id


@task(queue_name="idle")
async def later(value):
    return [value]


@task
async def double(value):
    return 2 * value


@task
def return_object():
    return object()


not_a_task = add.func
