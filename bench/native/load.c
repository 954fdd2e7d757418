/*  The load that all contenders get: clients and workers of Majordomo as raw DEALERs in one process, one thread beside
    libzmq's own.  Workers echo; each client keeps so many requests outstanding.

        load LIBZMQ ENDPOINT DIALECT CLIENTS WORKERS OUTSTANDING BODY PID

    DIALECT is 0.1, 0.2 or x1, BODY bytes, OUTSTANDING of each client, PID the process whose CPU time is taken, all of its
    threads.  Each line on stdin is a number of seconds: for so long new requests are sent, then the last ones are awaited,
    and a line of JSON tells what was done; so several of these can take turns of a tenth of a second.  CPU time is taken
    before and after, while the process does nothing, so that it is exact, and is for `requests`; `rate` is that of the
    seconds asked for.  At the end of stdin the workers say DISCONNECT, so that the broker can be measured again.  */

#include "libzmq.h"
#include <dirent.h>
#include <time.h>

enum { FEWEST = 8, LONGEST = 10 };  /*  requests of which anything can be said; seconds  */

static dialect_t dialect;
static const char *client_header, *worker_header, *body;
static size_t body_size;
static unsigned char final, heartbeat, disconnect;

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

static void request (void *socket, unsigned long number)
{
    if (dialect == DX1) {
        char digits [24];
        int size = snprintf (digits, sizeof digits, "%lu", number);
        zmq_send (socket, digits, size, ZMQ_SNDMORE);
    }
    if (dialect != D02)
        zmq_send (socket, "", 0, ZMQ_SNDMORE);
    zmq_send (socket, client_header, 6, ZMQ_SNDMORE);
    if (dialect != D01)
        zmq_send (socket, "\1", 1, ZMQ_SNDMORE);
    zmq_send (socket, SERVICE, strlen (SERVICE), ZMQ_SNDMORE);
    if (dialect == DX1)
        zmq_send (socket, "", 0, ZMQ_SNDMORE);
    zmq_send_const (socket, body, body_size, 0);
}

static void say (void *socket, unsigned char command, const char *service)
{
    if (dialect == D01)
        zmq_send (socket, "", 0, ZMQ_SNDMORE);
    zmq_send (socket, worker_header, 6, ZMQ_SNDMORE);
    zmq_send (socket, &command, 1, service ? ZMQ_SNDMORE : 0);
    if (service)
        zmq_send (socket, service, strlen (service), 0);
}

/*  What a worker does with what it gets.  Whether it had to tell the broker anew that it is there.  */
static int work (void *socket, zmq_msg_t *frames, int count)
{
    int at = dialect == D01 ? 1 : 0;
    unsigned char command = count > at + 1 ? *(unsigned char *) zmq_msg_data (&frames [at + 1]) : 0;
    int from = at + (dialect == DX1 ? 5 : 4);
    if (command == 2 && count > from) {
        for (int each = 0; each <= at; each++)
            zmq_msg_send (&frames [each], socket, ZMQ_SNDMORE);
        zmq_send (socket, &final, 1, ZMQ_SNDMORE);
        for (int each = at + 2; each <= at + 3; each++)
            zmq_msg_send (&frames [each], socket, ZMQ_SNDMORE);
        pass (socket, frames, from, count);
        zmq_msg_close (&frames [at + 1]);
        if (dialect == DX1)
            zmq_msg_close (&frames [at + 4]);
        return 0;
    }
    drop (frames, count);
    if (command == heartbeat)
        say (socket, heartbeat, NULL);
    if (command != disconnect)
        return 0;
    say (socket, 1, SERVICE);
    return 1;
}

/*  Whether what a client got is the FINAL of a request; `failed` counts the ERRORs.  */
static int ends (zmq_msg_t *frames, int count, unsigned long *failed)
{
    int at = dialect == D01 ? 1 : dialect == D02 ? 0 : 2;
    int done = count > at + 2;  /*  a HEARTBEAT has no service  */
    if (done && dialect == DX1 && *(unsigned char *) zmq_msg_data (&frames [at + 1]) == 4)
        ++*failed;
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
    dialect = dialect_of (argv [3]);
    int clients = atoi (argv [4]), workers = atoi (argv [5]), outstanding = atoi (argv [6]);
    body_size = strtoul (argv [7], NULL, 10);
    client_header = dialect == D01 ? "MDPC01" : dialect == D02 ? "MDPC02" : "MDPCX1";
    worker_header = dialect == D01 ? "MDPW01" : dialect == D02 ? "MDPW02" : "MDPWX1";
    final = dialect == D01 ? 3 : 4;
    heartbeat = final + 1;
    disconnect = final + 2;
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

    unsigned long done = 0, failed = 0, again = 0, under_way = 0;
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
                    again += work (socket, frames, count);
                else
                if (ends (frames, count, &failed)) {
                    done++;
                    if (phase == SENDING)
                        request (socket, ++numbers [at]);
                    else
                        under_way--;
                }
            }
        }
        switch (phase) {
        case IDLE:
            if (!items [all].revents)  /*  its end is an error to zmq_poll  */
                break;
            if (!fgets (line, sizeof line, stdin))
                goto end;
            cpu = cpu_seconds (pid);
            done = failed = again = 0;
            begun = now ();
            until = begun + atof (line);
            for (int sent = 0; sent < outstanding; sent++)
                for (int at = workers; at < all; at++)
                    request (items [at].socket, ++numbers [at]);
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
            printf ("{\"requests\": %lu, \"rate\": %.3f, \"cpu\": %.9f, \"lost\": %lu, \"failed\": %lu, \"again\": %lu}\n",
                    done, rate, cpu_seconds (pid) - cpu, under_way, failed, again);
            fflush (stdout);
            phase = IDLE;
        }
    }
end:
    for (int at = 0; at < all; at++) {
        if (at < workers)
            say (items [at].socket, disconnect, NULL);
        zmq_close (items [at].socket);
    }
    zmq_ctx_term (context);
    return 0;
}
