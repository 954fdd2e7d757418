"""From the reply to a request to the answers of its rows."""

from collections.abc import Iterable, Sequence
from typing import Final

from ...mdp.codes import Code
from .packs import Answer

OK: Final = 200
"""The code of a row that has its reply, as in Titanic."""
_ONE_ROW: Final = "a request of one row needs one frame"


class RowFailed(Exception):
    """A request failed; code and text go into its rows."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


def row_answer(frames: list[bytes], result: str) -> Answer:
    """Return the answer of a row with this reply."""
    if result == "frames":
        return Answer(frames, OK)
    if len(frames) != 1:
        return Answer(None, Code.FAILED, f"the reply has {_count_frames(len(frames))}; {_ONE_ROW}")
    return Answer(frames[0], OK) if result == "binary" else _decode(frames[0])


def unpack_reply(reply: Sequence[bytes], count: int, result: str) -> Iterable[Answer]:
    """Return the answers of the `count` rows packed in a request.  Raises `RowFailed` if it lacks frames."""
    if result == "frames":
        return [Answer(list(reply), OK)]
    if len(reply) != count:
        rows = "one row" if count == 1 else f"{count} rows"
        raise RowFailed(
            Code.FAILED, f"the reply has {_count_frames(len(reply))}; a request of {rows} needs {_count_frames(count)}"
        )
    if result == "binary":
        return [Answer(frame, OK) for frame in reply]
    return map(_decode, reply)


def _decode(frame: bytes) -> Answer:
    try:
        return Answer(frame.decode(), OK)
    except UnicodeDecodeError as error:
        return Answer(None, Code.FAILED, f"the reply is not valid UTF-8 ({error}); use result='binary'")


def _count_frames(count: int) -> str:
    return "one frame" if count == 1 else f"{count} frames"
