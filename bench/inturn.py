"""Workers that are given requests in turn, whether they are busy or not: what zmdp is compared with.

`proxy` is ZeroMQ's own ROUTER–DEALER proxy, which deals requests out; `worker` sleeps as many milliseconds as a request
says.
"""

import sys
import time

import zmq


def proxy() -> None:
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (front, back)]
    print(*(f"tcp://127.0.0.1:{port}" for port in ports), flush=True)
    zmq.proxy(front, back)


def worker(endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(endpoint)
    print("ready", flush=True)
    while True:
        message = socket.recv_multipart()
        time.sleep(float(message[2]) / 1000)
        socket.send_multipart(message)


if __name__ == "__main__":
    proxy() if sys.argv[1] == "proxy" else worker(sys.argv[2])
