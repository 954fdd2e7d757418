"""Its settings: the file SHOP_DB is both the project's database and Titanic's."""

import os
from importlib.util import find_spec

BACKEND = "zmdp.titanic.contrib.django.TitanicBackend"

SECRET_KEY = "for tests"
USE_TZ = True
DEBUG = True  # Django then keeps the statements that it executes, which must work with Titanic's as well
INSTALLED_APPS = ["support.shop", *(["django_tasks"] if find_spec("django.tasks") is None else [])]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["SHOP_DB"],
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 60},
    }
}
TASKS = {
    "default": {"BACKEND": BACKEND, "QUEUES": ["default", "idle"]},
    "retrying": {
        "BACKEND": BACKEND,
        "OPTIONS": {
            "retries": 2,
            "backoff": 0.01,
            "ttl": None,
            "prefix": "retrying.",
            "group": "tenant-7",
        },
    },
}
