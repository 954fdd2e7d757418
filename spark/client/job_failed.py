"""The error of a query or job, as people want to read it."""

import json
import re
from contextlib import suppress
from typing import Any, Final, Self

from ...mdp.errors import ServiceError

_STATE: Final = re.compile(r"\s*\bSQLSTATE: \w{5}\b")
_POSITION: Final = re.compile(r";? ?\(?\bline (\d{1,6}),? pos (\d{1,6})\)?")
_CAUSE: Final = "; caused by "
_SENTENCE: Final = re.compile(r"(?<=[.?!]) (?=[A-Z])")


class JobFailed(ServiceError):
    """A query or a job has failed, or was refused.

        try:
            SparkJobs(client).sql("SELECT * FROM nowhere")
        except JobFailed as error:
            print(error.condition, error.remedy)        # TABLE_OR_VIEW_NOT_FOUND Verify the spelling …

    Its text has a line for each of these parts; Jupyter and IPython show it in place of a traceback.

    Args:
        code: 422 if the request is at fault, otherwise as in the table of errors of docs/spark/index.md.
        text: The batch's message.
        detail: Spark's condition, as JSON, if it was an error of Spark's.
        service: The service that was called.
        job: The job's id, if it had begun.
        query: The query, if it was one.
    """

    def __init__(
        self, code: int, text: str, detail: bytes | None = None, *, service: str = "", job: str = "", query: str = ""
    ) -> None:
        super().__init__(code, text, detail, service=service)
        self.job = job
        self.query = query
        spark: dict[str, Any] = {}
        with suppress(ValueError, TypeError):
            spark = dict(json.loads(detail or b"{}"))
        self.condition: str | None = spark.get("condition")
        """Spark's name for the error, such as `TABLE_OR_VIEW_NOT_FOUND`; None if it is not an error of Spark's."""
        self.sqlstate: str | None = spark.get("sqlstate")
        position = _POSITION.search(text)
        self.line = int(position[1]) if position else None
        """The line of the query, counted from 1, if Spark says so."""
        self.column = int(position[2]) if position else None
        """The column in that line, counted from 0."""
        told, _, self.cause = _POSITION.sub("", _STATE.sub("", text)).partition(_CAUSE)
        self.problem, *rest = _SENTENCE.split(told, maxsplit=1)
        """The first sentence of the text."""
        self.remedy = "".join(rest)
        """The rest of the text: how to find the reason, and what to do."""

    @classmethod
    def of(cls, error: ServiceError, *, job: str = "", query: str = "") -> Self:
        """Return the error of a request to a batch, with job and query, which only the caller knows.

            raise JobFailed.of(error, job="6f1c0a52d8e94b37") from None

        Args:
            error: The error that the client raised.
            job: The job's id.
            query: The query.

        Returns:
            The error to raise.
        """
        return cls(error.code, error.text, error.detail, service=error.service, job=job, query=query)

    def lines(self) -> list[str]:
        """Return the error as lines of text, as `str` does.

            log.error("the report failed:\\n%s", "\\n".join(error.lines()))

        Returns:
            The problem, then, indented, its remedy, cause, line of the query, and job; those that there are.
        """
        found = [self.problem] + [f"  {part}" for part in (self.remedy, self.cause and f"cause: {self.cause}") if part]
        written = self.query.splitlines()
        if self.line is not None and self.column is not None and 0 < self.line <= len(written):
            number = f"  line {self.line}: "
            found += [f"{number}{written[self.line - 1]}", f"{' ' * (len(number) + self.column)}^"]
        if self.job:
            found.append(f"  more: mdp-spark logs {self.job}")
        return found

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints in place of a traceback, which would show zmdp's internals."""
        first, *others = self.lines()
        return [f"\x1b[31;1m{type(self).__name__}\x1b[0m ({self.code}): \x1b[1m{first}\x1b[0m", *others]
