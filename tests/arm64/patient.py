"""A pytest plugin: hypothesis without deadlines and with fewer examples, for an emulated processor."""

from hypothesis import settings

settings.register_profile("patient", deadline=None, max_examples=10)
settings.load_profile("patient")
