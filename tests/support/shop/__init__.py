"""A project of Django, for the tests of its task backend."""
