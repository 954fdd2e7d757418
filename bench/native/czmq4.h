/*  The four functions of CZMQ 2 that the Guide's mdbroker.c uses and CZMQ 4 has no more, so that its source compiles
    unchanged (cc -include czmq4.h).  It binds a free port instead of its own, and prints it.  */

#include <czmq.h>

typedef void zctx_t;

static inline zctx_t *zctx_new (void)
{
    return zmalloc (1);
}

static inline void zctx_destroy (zctx_t **context)
{
    free (*context);
    *context = NULL;
}

static inline void *zsocket_new (zctx_t *context, int type)
{
    (void) context;
    return zsock_new (type);
}

static inline int zsocket_bind (void *socket, const char *endpoint)
{
    (void) endpoint;
    int port = zsock_bind (socket, "tcp://127.0.0.1:*");
    printf ("tcp://127.0.0.1:%d\n", port);
    fflush (stdout);
    return port;
}

/*  Its poll takes the ZeroMQ socket that is in CZMQ's.  */
static inline int poll_one (zmq_pollitem_t *items, int count, long timeout)
{
    items [0].socket = zsock_resolve (items [0].socket);
    return zmq_poll (items, count, timeout);
}
#define zmq_poll poll_one
