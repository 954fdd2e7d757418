/*  What a broker cannot cost less than: a ROUTER that forwards the frames of MDP/0.2 between clients and workers, and
    knows nothing of services, heartbeats or death.

        forward LIBZMQ

    As in Majordomo a worker gets a request when it has none, and the others wait in one line.  It prints its endpoint.
    Frames are moved and never copied; only what is constant or a few bytes long is made anew.  */

#include "libzmq.h"

/*  A ring of messages that grows.  A worker is a message of one frame, its identity.  */
typedef struct { int count; zmq_msg_t frames [MAX_FRAMES]; } message_t;
typedef struct { message_t *items; size_t first, count, room; } ring_t;

static ring_t workers, requests;
static void *router;

static message_t *at (ring_t *ring, size_t index)
{
    return &ring->items [(ring->first + index) % ring->room];
}

static void push (ring_t *ring, zmq_msg_t *frames, int count)
{
    if (ring->count == ring->room) {
        ring_t wider = { NULL, 0, ring->count, ring->room ? 2 * ring->room : 64 };
        wider.items = malloc (wider.room * sizeof *wider.items);
        if (!wider.items)
            die ("malloc");
        for (size_t index = 0; index < ring->count; index++)
            wider.items [index] = *at (ring, index);
        free (ring->items);
        *ring = wider;
    }
    message_t *last = at (ring, ring->count++);
    last->count = count;
    memcpy (last->frames, frames, count * sizeof *frames);
}

static message_t *pop (ring_t *ring)
{
    message_t *found = at (ring, 0);
    ring->first = (ring->first + 1) % ring->room;
    ring->count--;
    return found;
}

/*  From a client come its identity, MDPC02, REQUEST, the service and the body.  */
static void to_worker (zmq_msg_t *worker, zmq_msg_t *frames, int count)
{
    zmq_msg_send (worker, router, ZMQ_SNDMORE);
    zmq_send (router, "MDPW02", 6, ZMQ_SNDMORE);
    zmq_send (router, "\2", 1, ZMQ_SNDMORE);
    zmq_msg_send (&frames [0], router, ZMQ_SNDMORE);
    zmq_send (router, "", 0, ZMQ_SNDMORE);
    pass (router, frames, 4, count);
    drop (frames + 1, 3);
}

/*  From a worker come its identity, MDPW02, FINAL, the client's identity, an empty frame and the body.  */
static void to_client (zmq_msg_t *frames, int count)
{
    zmq_msg_send (&frames [3], router, ZMQ_SNDMORE);
    zmq_send (router, "MDPC02", 6, ZMQ_SNDMORE);
    zmq_send (router, "\3", 1, ZMQ_SNDMORE);
    zmq_send (router, SERVICE, strlen (SERVICE), ZMQ_SNDMORE);
    pass (router, frames, 5, count);
    drop (frames + 1, 2);
    drop (frames + 4, 1);
}

static void from_client (zmq_msg_t *frames, int count)
{
    if (requests.count || !workers.count)
        push (&requests, frames, count);
    else
        to_worker (pop (&workers)->frames, frames, count);
}

/*  This worker has nothing to do.  */
static void idle (zmq_msg_t *identity)
{
    if (requests.count) {
        message_t *request = pop (&requests);
        to_worker (identity, request->frames, request->count);
    }
    else
        push (&workers, identity, 1);
}

static void discard (zmq_msg_t *identity)
{
    for (size_t left = workers.count; left; left--) {
        zmq_msg_t worker = pop (&workers)->frames [0];
        if (is (identity, zmq_msg_data (&worker), zmq_msg_size (&worker)))
            zmq_msg_close (&worker);
        else
            push (&workers, &worker, 1);
    }
}

static void from_worker (zmq_msg_t *frames, int count)
{
    unsigned char command = *(unsigned char *) zmq_msg_data (&frames [2]);
    if (command == 4 && count > 5) {
        to_client (frames, count);
        idle (&frames [0]);
    }
    else
    if (command == 1) {
        drop (frames + 1, count - 1);
        idle (&frames [0]);
    }
    else {
        if (command == 6)
            discard (&frames [0]);
        drop (frames, count);
    }
}

int main (int argc, char **argv)
{
    if (argc != 2) {
        fprintf (stderr, "forward LIBZMQ\n");
        return 2;
    }
    open_libzmq (argv [1]);
    router = open_socket (zmq_ctx_new (), ZMQ_ROUTER, 0);
    if (zmq_bind (router, "tcp://127.0.0.1:*"))
        die ("zmq_bind");
    char endpoint [256];
    size_t size = sizeof endpoint;
    zmq_getsockopt (router, ZMQ_LAST_ENDPOINT, endpoint, &size);
    puts (endpoint);
    fflush (stdout);

    zmq_msg_t frames [MAX_FRAMES];
    while (1) {
        int count = receive (router, frames, 0);
        if (count < 3 || zmq_msg_size (&frames [1]) != 6)
            drop (frames, count);
        else
        if (((char *) zmq_msg_data (&frames [1])) [3] == 'C')
            from_client (frames, count);
        else
            from_worker (frames, count);
    }
}
