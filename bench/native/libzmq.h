/*  The few functions of libzmq that these programs use, taken from the very file that pyzmq has loaded, so that all
    contenders run on one libzmq and no headers of it are needed.  See bench/native.py.  */

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

/*  From libzmq's ABI, which has not changed since 4.0.  */
typedef struct { _Alignas (void *) unsigned char opaque [64]; } zmq_msg_t;
typedef struct { void *socket; int fd; short events; short revents; } zmq_pollitem_t;
enum { ZMQ_DEALER = 5, ZMQ_ROUTER = 6 };
enum { ZMQ_LINGER = 17, ZMQ_SNDHWM = 23, ZMQ_RCVHWM = 24, ZMQ_LAST_ENDPOINT = 32 };
enum { ZMQ_POLLIN = 1, ZMQ_DONTWAIT = 1, ZMQ_SNDMORE = 2 };
enum { MAX_SOCKETS = 2 };

static void *(*zmq_ctx_new) (void);
static int (*zmq_ctx_set) (void *, int, int);
static int (*zmq_ctx_term) (void *);
static void *(*zmq_socket) (void *, int);
static int (*zmq_close) (void *);
static int (*zmq_setsockopt) (void *, int, const void *, size_t);
static int (*zmq_getsockopt) (void *, int, void *, size_t *);
static int (*zmq_bind) (void *, const char *);
static int (*zmq_connect) (void *, const char *);
static int (*zmq_poll) (zmq_pollitem_t *, int, long);
static int (*zmq_send) (void *, const void *, size_t, int);
static int (*zmq_send_const) (void *, const void *, size_t, int);
static int (*zmq_msg_init) (zmq_msg_t *);
static int (*zmq_msg_close) (zmq_msg_t *);
static int (*zmq_msg_recv) (zmq_msg_t *, void *, int);
static int (*zmq_msg_send) (zmq_msg_t *, void *, int);
static int (*zmq_msg_more) (const zmq_msg_t *);
static void *(*zmq_msg_data) (zmq_msg_t *);
static size_t (*zmq_msg_size) (const zmq_msg_t *);

static inline void die (const char *what)
{
    fprintf (stderr, "%s: %s\n", what, strerror (errno));
    exit (1);
}

static inline void *symbol (void *library, const char *name)
{
    void *found = dlsym (library, name);
    if (!found) {
        fprintf (stderr, "%s\n", dlerror ());
        exit (1);
    }
    return found;
}

static inline void open_libzmq (const char *path)
{
#ifdef __linux__
    prctl (PR_SET_PDEATHSIG, SIGKILL);  /*  no process is left behind, however the benchmark ends  */
#endif
    void *library = dlopen (path, RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        fprintf (stderr, "%s\n", dlerror ());
        exit (1);
    }
#define TAKE(name) *(void **) &name = symbol (library, #name)
    TAKE (zmq_ctx_new);
    TAKE (zmq_ctx_set);
    TAKE (zmq_ctx_term);
    TAKE (zmq_socket);
    TAKE (zmq_close);
    TAKE (zmq_setsockopt);
    TAKE (zmq_getsockopt);
    TAKE (zmq_bind);
    TAKE (zmq_connect);
    TAKE (zmq_poll);
    TAKE (zmq_send);
    TAKE (zmq_send_const);
    TAKE (zmq_msg_init);
    TAKE (zmq_msg_close);
    TAKE (zmq_msg_recv);
    TAKE (zmq_msg_send);
    TAKE (zmq_msg_more);
    TAKE (zmq_msg_data);
    TAKE (zmq_msg_size);
#undef TAKE
}

/*  A socket that never refuses a message: what is outstanding bounds what waits in it.  */
static inline void *open_socket (void *context, int type, int linger)
{
    void *socket = zmq_socket (context, type);
    int none = 0;
    if (!socket)
        die ("zmq_socket");
    zmq_setsockopt (socket, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt (socket, ZMQ_SNDHWM, &none, sizeof none);
    zmq_setsockopt (socket, ZMQ_RCVHWM, &none, sizeof none);
    return socket;
}

#ifndef MAX_FRAMES
#define MAX_FRAMES 16
#endif

/*  One whole message: the number of its frames, 0 if there is none (with ZMQ_DONTWAIT).  */
static inline int receive (void *socket, zmq_msg_t *frames, int flags)
{
    int count = 0;
    do {
        if (count == MAX_FRAMES) {
            fprintf (stderr, "a message of more than %d frames\n", MAX_FRAMES);
            exit (1);
        }
        zmq_msg_init (&frames [count]);
        if (zmq_msg_recv (&frames [count], socket, flags) < 0) {
            if (errno == EAGAIN && count == 0)
                return 0;
            if (errno == EINTR)
                continue;
            die ("zmq_msg_recv");
        }
        count++;
    } while (count == 0 || zmq_msg_more (&frames [count - 1]));
    return count;
}

static inline void drop (zmq_msg_t *frames, int count)
{
    for (int at = 0; at < count; at++)
        zmq_msg_close (&frames [at]);
}

static inline int is (zmq_msg_t *frame, const char *text, size_t size)
{
    return zmq_msg_size (frame) == size && memcmp (zmq_msg_data (frame), text, size) == 0;
}

/*  Send a frame that came in, and the rest of the message after it; bodies are moved, not copied.  */
static inline void pass (void *socket, zmq_msg_t *frames, int from, int to)
{
    for (int at = from; at < to; at++)
        if (zmq_msg_send (&frames [at], socket, at + 1 < to ? ZMQ_SNDMORE : 0) < 0)
            zmq_msg_close (&frames [at]);
}

#define SERVICE "bench"
