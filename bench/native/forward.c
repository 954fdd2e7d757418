/*  What a broker cannot cost less than: a ROUTER that forwards the frames of MDP/0.1 and MDP/0.2 between clients and
    workers, and knows nothing of services, heartbeats or death.

        forward LIBZMQ [in-turn]

    As in Majordomo a worker gets a request when it has none, and the others wait in one line.  With `in-turn` workers get
    requests in turn, busy or not, and nothing waits here: that is cheaper, as many are under way to each worker then, and
    travel together.  It prints its endpoint.  Frames are moved and never copied; only what is constant or a few bytes long
    is made anew.  */

#include "libzmq.h"

/*  A ring of messages that grows.  A worker is a message of one frame, its identity.  */
typedef struct { int count; zmq_msg_t frames [MAX_FRAMES]; } message_t;
typedef struct { message_t *items; size_t first, count, room; } ring_t;

static ring_t workers, requests;
static void *router;
static int in_turn;

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

static dialect_t dialect_of_header (zmq_msg_t *frame)
{
    return ((const char *) zmq_msg_data (frame)) [5] == '2' ? D02 : D01;
}

/*  The header comes after the sender's identity, and after the envelope if there is one.  */
static int header_of (zmq_msg_t *frames, int count)
{
    int header = 1;
    while (header < count
       && (zmq_msg_size (&frames [header]) != 6 || memcmp (zmq_msg_data (&frames [header]), "MDP", 3) != 0))
        header++;
    return header;
}

static void to_worker (const void *worker, size_t size, zmq_msg_t *frames, int count)
{
    int header = header_of (frames, count);
    dialect_t dialect = dialect_of_header (&frames [header]);
    int body = header + (dialect == D01 ? 2 : 3);
    zmq_send (router, worker, size, ZMQ_SNDMORE);
    if (dialect == D01)
        zmq_send (router, "", 0, ZMQ_SNDMORE);
    zmq_send (router, dialect == D01 ? "MDPW01" : "MDPW02", 6, ZMQ_SNDMORE);
    zmq_send (router, "\2", 1, ZMQ_SNDMORE);
    zmq_msg_send (&frames [0], router, ZMQ_SNDMORE);
    zmq_send (router, "", 0, ZMQ_SNDMORE);
    pass (router, frames, body, count);
    drop (frames + 1, body - 1);
}

static void to_client (zmq_msg_t *frames, int count, int header, dialect_t dialect)
{
    zmq_msg_send (&frames [header + 2], router, ZMQ_SNDMORE);
    if (dialect == D01)
        zmq_send (router, "", 0, ZMQ_SNDMORE);
    zmq_send (router, dialect == D01 ? "MDPC01" : "MDPC02", 6, ZMQ_SNDMORE);
    if (dialect == D02)
        zmq_send (router, "\3", 1, ZMQ_SNDMORE);
    zmq_send (router, SERVICE, strlen (SERVICE), ZMQ_SNDMORE);
    pass (router, frames, header + 4, count);
    drop (frames + 1, header + 1);
    drop (frames + header + 3, 1);
}

static void from_client (zmq_msg_t *frames, int count)
{
    if (requests.count || !workers.count) {
        push (&requests, frames, count);
        return;
    }
    message_t *worker = pop (&workers);
    zmq_msg_t identity = worker->frames [0];
    if (in_turn)
        push (&workers, &identity, 1);
    to_worker (zmq_msg_data (&identity), zmq_msg_size (&identity), frames, count);
    if (!in_turn)
        zmq_msg_close (&identity);
}

/*  This worker has nothing to do.  */
static void idle (zmq_msg_t *identity)
{
    while (requests.count) {
        message_t *request = pop (&requests);
        to_worker (zmq_msg_data (identity), zmq_msg_size (identity), request->frames, request->count);
        if (!in_turn) {
            zmq_msg_close (identity);
            return;
        }
    }
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

static void from_worker (zmq_msg_t *frames, int count, int header)
{
    dialect_t dialect = dialect_of_header (&frames [header]);
    unsigned char command = *(unsigned char *) zmq_msg_data (&frames [header + 1]);
    unsigned char final = dialect == D01 ? 3 : 4;
    if (command == final && header + 4 < count) {
        to_client (frames, count, header, dialect);
        if (!in_turn)
            idle (&frames [0]);
        else
            drop (frames, 1);
    }
    else
    if (command == 1 && header + 2 < count && is (&frames [header + 2], SERVICE, strlen (SERVICE))) {
        drop (frames + 1, count - 1);
        idle (&frames [0]);
    }
    else {  /*  workers of other services are only connections to it  */
        if (command == final + 2)
            discard (&frames [0]);
        drop (frames, count);
    }
}

int main (int argc, char **argv)
{
    if (argc < 2) {
        fprintf (stderr, "forward LIBZMQ [in-turn]\n");
        return 2;
    }
    in_turn = argc > 2;
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
        int header = header_of (frames, count);
        if (header + 2 > count)
            drop (frames, count);
        else
        if (((char *) zmq_msg_data (&frames [header])) [3] == 'C')
            from_client (frames, count);
        else
            from_worker (frames, count, header);
    }
}
