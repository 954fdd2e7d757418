/*  The load that all contenders get: Majordomo clients and workers as raw DEALERs in one process, on one thread beside
    libzmq's own.  Workers echo; each client keeps OUTSTANDING requests under way.

        load LIBZMQ ENDPOINT DIALECT CLIENTS WORKERS OUTSTANDING BODY PID

    DIALECT is 0.2 or x1.  BODY is the size of a body in bytes, and PID the process whose CPU time is measured, all
    threads included.  A worker of x1 holds 64 requests; the others hold one.

    Each line on stdin is a number of seconds.  For that long the clients send new requests; then they wait for the last
    replies, and a line of JSON reports what was done.  Several of these programs can therefore take turns of a tenth of a
    second.  CPU time is read before and after, while the process is idle, so it is exact; it covers `requests`.  `rate`
    covers the seconds asked for.  At the end of stdin the workers send DISCONNECT, so that the broker can be measured again.

    In x1 a client sends its requests together: for the k replies that have arrived together it sends k requests in one
    message.  A worker answers each message with one message.  */

#define MAX_FRAMES 80  /*  an X1 message has up to 64 attachments  */
#include "libzmq.h"
#include <dirent.h>
#include <time.h>

enum { FEWEST = 8, LONGEST = 10 };  /*  requests that a measurement needs at least; seconds  */

/*  X1's messages, as mdp/wire/batch.py specifies them.  */
enum { CREDIT = 64, HEAD = 13, MAX_RECORDS = 256, MAX_RECORDS_BYTES = 65536 };
enum { MAX_ATTACHMENTS = 64, MAX_ATTACHED_BYTES = 1 << 20, SHARED = 8192 };
#define ATTACHED 0xFFFFFFFFu
static const char BATCH = 9;

static enum { D02, DX1 } dialect;
static const char *client_header, *worker_header, *body;
static size_t body_size;
enum { FINAL = 4, HEARTBEAT, DISCONNECT };

static double now (void)
{
    struct timespec time;
    clock_gettime (CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

/*  Seconds of CPU that all threads of a process have used.  */
static double cpu_seconds (const char *pid)
{
    char path [512];
    double sum = 0;
    snprintf (path, sizeof path, "/proc/%s/task", pid);
    DIR *tasks = opendir (path);
    if (!tasks)
        die (path);
    for (struct dirent *task; (task = readdir (tasks));) {
        unsigned long long nanoseconds;
        if (task->d_name [0] == '.')
            continue;
        snprintf (path, sizeof path, "/proc/%s/task/%s/schedstat", pid, task->d_name);
        FILE *file = fopen (path, "r");
        if (file) {
            if (fscanf (file, "%llu", &nanoseconds) == 1)
                sum += nanoseconds / 1e9;
            fclose (file);
        }
    }
    closedir (tasks);
    return sum;
}

/*  ── X1: many commands in a message ─────────────────────────────────────────────────────────────────────────────────  */

/*  The records that the next message carries.  Its attachments are all the same: the body.  */
static struct { unsigned char *bytes; size_t size, room; int records, attachments; } batch;

static unsigned char *extend (size_t size)
{
    if (batch.size + size > batch.room) {
        batch.room = 2 * (batch.size + size);
        batch.bytes = realloc (batch.bytes, batch.room);
        if (!batch.bytes)
            die ("realloc");
    }
    unsigned char *at = batch.bytes + batch.size;
    batch.size += size;
    return at;
}

static unsigned char *put (unsigned char *at, unsigned long long value, int bytes)
{
    while (bytes--)
        *at++ = value >> 8 * bytes;
    return at;
}

static unsigned long get32 (const unsigned char *at)
{
    return (unsigned long) at [0] << 24 | at [1] << 16 | at [2] << 8 | at [3];
}

/*  Begin a record whose size is known: return where its payload goes.  */
static unsigned char *record (unsigned char command, const unsigned char *id, size_t payload)
{
    unsigned char *at = put (extend (HEAD + payload), HEAD - 4 + payload, 4);
    *at++ = command;
    memcpy (at, id, 8);
    batch.records++;
    return at + 8;
}

/*  Send what was packed, with `count` attachments from `frames`, or with copies of the body.  */
static void flush (void *socket, const char *header, zmq_msg_t *frames, int count)
{
    int attached = frames ? count : batch.attachments;
    if (!batch.records)
        return;
    zmq_send (socket, "", 0, ZMQ_SNDMORE);
    zmq_send (socket, header, 6, ZMQ_SNDMORE);
    zmq_send (socket, &BATCH, 1, ZMQ_SNDMORE);
    zmq_send (socket, batch.bytes, batch.size, attached ? ZMQ_SNDMORE : 0);
    if (frames)
        pass (socket, frames, 0, count);
    else
        for (int left = attached; left; left--)
            zmq_send_const (socket, body, body_size, left > 1 ? ZMQ_SNDMORE : 0);
    batch.size = batch.records = batch.attachments = 0;
}

static void pack_request (void *socket, unsigned long number)
{
    int attach = body_size >= SHARED;
    size_t service = strlen (SERVICE), payload = 4 + 1 + service + 2 + 2 + 4 + (attach ? 0 : body_size);
    if (batch.records == MAX_RECORDS || batch.size + HEAD + payload > MAX_RECORDS_BYTES
     || (attach && (batch.attachments == MAX_ATTACHMENTS || (batch.attachments + 1) * body_size > MAX_ATTACHED_BYTES)))
        flush (socket, client_header, NULL, 0);
    unsigned char id [8];
    put (id, number, 8);
    unsigned char *at = record (1, id, payload);
    at = put (at, 0, 4);  /*  no ttl  */
    at = put (at, service, 1);
    memcpy (at, SERVICE, service);
    at = put (at + service, 0, 2);  /*  no options  */
    at = put (at, 1, 2);  /*  frames  */
    at = put (at, attach ? ATTACHED : body_size, 4);
    if (attach)
        batch.attachments++;
    else
        memcpy (at, body, body_size);
}

static void pack_ready (void)
{
    size_t service = strlen (SERVICE);
    unsigned char *at = record (1, (const unsigned char [8]) { 0 }, 4 + 1 + service + 2);
    at = put (at, CREDIT, 4);
    at = put (at, service, 1);
    memcpy (at, SERVICE, service);
    put (at + service, 0, 2);  /*  no options  */
}

/*  The next record of `frame`, which the broker packed: its size with its head, 0 at the end.  */
static size_t next (zmq_msg_t *frame, size_t at)
{
    size_t size = zmq_msg_size (frame);
    if (at + HEAD > size)
        return 0;
    size_t found = 4 + get32 ((unsigned char *) zmq_msg_data (frame) + at);
    return found >= HEAD && at + found <= size ? found : 0;
}

static int is_batch (zmq_msg_t *frames, int count)
{
    return count > 3 && is (&frames [2], &BATCH, 1);
}

/*  Pack a FINAL for each REQUEST, with the same body, whose encoding and attachments are the same in both directions.
    Returns whether there was a DISCONNECT.  */
static int work_batch (void *socket, zmq_msg_t *frames, int count)
{
    size_t size;
    int sent_away = 0;
    for (size_t at = 0; (size = next (&frames [3], at)); at += size) {
        const unsigned char *from = (unsigned char *) zmq_msg_data (&frames [3]) + at;
        sent_away |= from [4] == DISCONNECT;
        if (from [4] != 2 || size < HEAD + 7)
            continue;
        size_t skipped = HEAD + 7 + (from [HEAD + 5] << 8 | from [HEAD + 6]);  /*  ttl, attempt, options  */
        if (skipped <= size)
            memcpy (record (FINAL, from + 5, size - skipped), from + skipped, size - skipped);
    }
    flush (socket, worker_header, frames + 4, count - 4);
    drop (frames, 4);
    return sent_away;
}

/*  How many requests of a client a batch ends; `failed` counts the ERRORs.  */
static int ends_in_batch (zmq_msg_t *frames, unsigned long *failed)
{
    int done = 0;
    size_t size;
    for (size_t at = 0; (size = next (&frames [3], at)); at += size) {
        unsigned char command = ((unsigned char *) zmq_msg_data (&frames [3])) [at + 4];
        done += command == 3 || command == 4;
        *failed += command == 4;
    }
    return done;
}

/*  ── all dialects ───────────────────────────────────────────────────────────────────────────────────────────────────  */

static void request (void *socket, unsigned long number)
{
    if (dialect == DX1) {
        pack_request (socket, number);
        return;
    }
    zmq_send (socket, client_header, 6, ZMQ_SNDMORE);
    zmq_send (socket, "\1", 1, ZMQ_SNDMORE);
    zmq_send (socket, SERVICE, strlen (SERVICE), ZMQ_SNDMORE);
    zmq_send_const (socket, body, body_size, 0);
}

static void say (void *socket, unsigned char command, const char *service)
{
    if (dialect == DX1 && command != HEARTBEAT) {
        if (service)
            pack_ready ();
        else
            record (command, (const unsigned char [8]) { 0 }, 0);
        flush (socket, worker_header, NULL, 0);
        return;
    }
    if (dialect != D02)
        zmq_send (socket, "", 0, ZMQ_SNDMORE);
    zmq_send (socket, worker_header, 6, dialect == DX1 ? 0 : ZMQ_SNDMORE);
    if (dialect == DX1)
        return;
    zmq_send (socket, &command, 1, service ? ZMQ_SNDMORE : 0);
    if (service)
        zmq_send (socket, service, strlen (service), 0);
}

/*  What a worker does with a message.  */
static void work (void *socket, zmq_msg_t *frames, int count)
{
    if (dialect == DX1 && is_batch (frames, count)) {
        if (work_batch (socket, frames, count))
            say (socket, 1, SERVICE);
        return;
    }
    int at = dialect == D02 ? 0 : 1;
    unsigned char command = count > at + 1 ? *(unsigned char *) zmq_msg_data (&frames [at + 1]) : 0;
    if (command == 2 && count > at + 4) {
        zmq_msg_send (&frames [0], socket, ZMQ_SNDMORE);
        zmq_send (socket, "\4", 1, ZMQ_SNDMORE);
        pass (socket, frames, 2, count);
        zmq_msg_close (&frames [1]);
        return;
    }
    drop (frames, count);
    if (command == HEARTBEAT || count == at + 1)  /*  in X1 a bare header is a heartbeat  */
        say (socket, HEARTBEAT, NULL);
    else
    if (command == DISCONNECT)
        say (socket, 1, SERVICE);
}

/*  How many requests of a client a message ends; `failed` counts the ERRORs.  */
static int ends (zmq_msg_t *frames, int count, unsigned long *failed)
{
    int done = dialect != DX1 ? 1 : is_batch (frames, count) ? ends_in_batch (frames, failed) : 0;
    drop (frames, count);
    return done;
}

int main (int argc, char **argv)
{
    if (argc != 9) {
        fprintf (stderr, "load LIBZMQ ENDPOINT DIALECT CLIENTS WORKERS OUTSTANDING BODY PID\n");
        return 2;
    }
    open_libzmq (argv [1]);
    const char *endpoint = argv [2], *pid = argv [8];
    dialect = strcmp (argv [3], "0.2") == 0 ? D02 : DX1;
    int clients = atoi (argv [4]), workers = atoi (argv [5]), outstanding = atoi (argv [6]);
    body_size = strtoul (argv [7], NULL, 10);
    client_header = dialect == D02 ? "MDPC02" : "MDPCX1";
    worker_header = dialect == D02 ? "MDPW02" : "MDPWX1";
    char *filled = malloc (body_size + 1);
    memset (filled, 'x', body_size + 1);
    body = filled;

    void *context = zmq_ctx_new ();
    int all = workers + clients;
    zmq_ctx_set (context, MAX_SOCKETS, all + 16);
    zmq_pollitem_t *items = calloc (all + 1, sizeof *items);
    unsigned long *numbers = calloc (all, sizeof *numbers);
    for (int at = 0; at < all; at++) {
        items [at].socket = open_socket (context, ZMQ_DEALER, 1000);
        items [at].events = ZMQ_POLLIN;
        if (zmq_connect (items [at].socket, endpoint))
            die (endpoint);
        if (at < workers)
            say (items [at].socket, 1, SERVICE);
    }
    items [all].fd = 0;
    items [all].events = ZMQ_POLLIN;

    unsigned long done = 0, failed = 0, under_way = 0;
    enum { IDLE, SENDING, ENDING } phase = IDLE;
    double begun = 0, until = 0, cpu = 0, rate = 0, time;
    zmq_msg_t frames [MAX_FRAMES];
    char line [64];
    while (1) {
        if (zmq_poll (items, phase == IDLE ? all + 1 : all, phase == IDLE ? 1000 : 20) < 0 && errno != EINTR)
            die ("zmq_poll");
        for (int at = 0; at < all; at++) {
            void *socket = items [at].socket;
            if (!(items [at].revents & ZMQ_POLLIN))
                continue;
            for (int taken = 0, count; taken < 256 && (count = receive (socket, frames, ZMQ_DONTWAIT)); taken++) {
                if (at < workers)
                    work (socket, frames, count);
                else
                    for (int left = ends (frames, count, &failed); left; left--) {
                        done++;
                        if (phase == SENDING)
                            request (socket, ++numbers [at]);
                        else
                            under_way--;
                    }
            }
            flush (socket, client_header, NULL, 0);
        }
        switch (phase) {
        case IDLE:
            if (!items [all].revents)  /*  its end is an error to zmq_poll  */
                break;
            if (!fgets (line, sizeof line, stdin))
                goto end;
            cpu = cpu_seconds (pid);
            done = failed = 0;
            begun = now ();
            until = begun + atof (line);
            for (int at = workers; at < all; at++) {
                for (int sent = 0; sent < outstanding; sent++)
                    request (items [at].socket, ++numbers [at]);
                flush (items [at].socket, client_header, NULL, 0);
            }
            under_way = (unsigned long) clients * outstanding;
            phase = SENDING;
            break;
        case SENDING:
            time = now ();
            if (time < until || (done < FEWEST && time < until + LONGEST))
                break;
            rate = done / (time - begun);
            until = time + LONGEST;
            phase = ENDING;
            break;
        case ENDING:
            if (under_way && now () < until)
                break;
            nanosleep (&(struct timespec) { 0, 2000000 }, NULL);  /*  until the broker does nothing any more  */
            printf ("{\"requests\": %lu, \"rate\": %.3f, \"cpu\": %.9f, \"lost\": %lu, \"failed\": %lu}\n",
                    done, rate, cpu_seconds (pid) - cpu, under_way, failed);
            fflush (stdout);
            phase = IDLE;
        }
    }
end:
    for (int at = 0; at < all; at++) {
        if (at < workers)
            say (items [at].socket, DISCONNECT, NULL);
        zmq_close (items [at].socket);
    }
    zmq_ctx_term (context);
    return 0;
}
