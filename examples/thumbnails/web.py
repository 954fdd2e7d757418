# web.py
import json
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated
from uuid import UUID

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from thumbnails import Job, Series, Thumbnail, make, series

from zmdp import AsyncClient, AsyncTitanic
from zmdp.clients import RequestError, ServiceError
from zmdp.titanic import UnknownTicket


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncClient() as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


def the_client(request: Request) -> AsyncClient:
    return request.app.state.client


Client = Annotated[AsyncClient, Depends(the_client)]


@app.post("/thumbnail")
async def thumbnail(request: Request, client: Client, width: int = 128) -> Response:
    png = await client.call(make, Job(await request.body(), width))
    return Response(png, media_type="image/png")


@app.exception_handler(ServiceError)
async def failed(request: Request, error: ServiceError) -> JSONResponse:
    """The service says what is wrong, with a code as in HTTP."""
    return JSONResponse({"detail": error.text}, status_code=error.code)


@app.exception_handler(RequestError)
async def unavailable(request: Request, error: RequestError) -> JSONResponse:
    """There is no worker or no broker, or they take too long."""
    return JSONResponse({"detail": str(error)}, status_code=503)


Widths = Annotated[list[int], Query()]


@app.post("/series")
async def make_series(request: Request, client: Client, widths: Widths) -> StreamingResponse:
    parts = client.stream(series, Series(await request.body(), widths))
    return StreamingResponse(events(parts), media_type="text/event-stream")


async def events(parts: AsyncGenerator[Thumbnail, None]) -> AsyncIterator[str]:
    async with aclosing(parts):
        try:
            async for part in parts:
                data = {"done": part.done, "total": part.total, "png": b64encode(part.png).decode()}
                yield f"data: {json.dumps(data)}\n\n"
        except RequestError as error:
            yield f"event: error\ndata: {json.dumps(str(error))}\n\n"


@app.post("/jobs", status_code=202)
async def submit(request: Request, client: Client, widths: Widths) -> dict[str, str]:
    job = Series(await request.body(), widths)
    ticket = await AsyncTitanic(client).submit(series, job, retries=3, ttl=86400)
    return {"id": ticket.uuid}


@app.get("/jobs/{uuid}")
async def follow(uuid: UUID, client: Client) -> StreamingResponse:
    ticket = AsyncTitanic(client).ticket(uuid, series)
    await ticket.ready()  # raises UnknownTicket before the answer begins
    return StreamingResponse(events(ticket.partials()), media_type="text/event-stream")


@app.delete("/jobs/{uuid}", status_code=204)
async def delete(uuid: UUID, client: Client) -> None:
    await AsyncTitanic(client).ticket(uuid).close()


@app.exception_handler(UnknownTicket)
async def unknown(request: Request, error: UnknownTicket) -> JSONResponse:
    return JSONResponse({"detail": "there is no such job"}, status_code=404)
