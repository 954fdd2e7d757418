"""ZeroMQ's own ROUTER–DEALER proxy, which distributes requests round robin; it prints its two endpoints."""

import zmq

if __name__ == "__main__":
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (front, back)]
    print(*(f"tcp://127.0.0.1:{port}" for port in ports), flush=True)
    zmq.proxy(front, back)
