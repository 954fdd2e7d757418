"""The sessions that register tables as jobs name them, with a stand-in for Spark; test_catalogue.py has the rest."""

import gc

from zmdp.spark.batch.catalogue.catalogue_file import Catalogue
from zmdp.spark.batch.catalogue.inferred_schemas import Schemas
from zmdp.spark.batch.catalogue.request_tables import RequestTables, register_when_named
from zmdp.spark.batch.catalogue.roles import EVERYTHING


def test_the_end_of_a_jobs_session_closes_nothing_that_other_sessions_share():
    class Session:
        """Like Connect's, which closes the connection at its end."""

        def __del__(self):
            closed.append(self)

    closed = []
    session = Session()
    register_when_named(session, RequestTables(session, Catalogue(), Schemas(), EVERYTHING))
    assert isinstance(session, Session)
    del session
    gc.collect()
    assert closed == []
