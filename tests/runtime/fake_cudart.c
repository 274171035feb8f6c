/* A CUDA runtime for tests (-DHIP: a ROCm one) whose device memory is host memory that other processes can map.
 *
 * Memory and events are memfds, so that nothing outlives its processes; a handle names a descriptor of a process.
 * A stream is a queue: 0 and 1 are those of the first device, 2 and 3 those of the second. It runs by itself as far as
 * its waits allow, unless fakeDefer(1): then only fakeAdvance runs it.
 * A copy reads device memory when it runs and other memory when it is queued; it writes when it runs.
 *
 * The ROCm variant has HIP's weaknesses at once: a wait sees the event's latest record when it runs, not when it was
 * queued; and a stream cannot wait for an event that was recorded more than 32 times.
 *
 * FAKE_CUDART_MEMORY_BYTES bounds what is allocated, FAKE_CUDART_NO_PEER takes peer access away, FAKE_CUDART_VISIBLE=1
 * hides all devices but number 1, and FAKE_CUDART_FAIL=IpcOpenMemHandle:304 lets a function fail with a number. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef HIP
#define API(name) hip##name
enum { LATEST_RECORD = 1, MAX_RECORDS = 32 };
#else
#define API(name) cuda##name
enum { LATEST_RECORD = 0, MAX_RECORDS = 1 << 30 };
#endif

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
    PEER_UNSUPPORTED = 217, INVALID_HANDLE = 400, NOT_READY = 600,
};
enum { NUM_DEVICES = 2, STREAMS_PER_DEVICE = 2, NUM_STREAMS = 4, NUM_BLOCKS = 256, EVENT_FLAGS = 6, PAGE = 4096 };

/* What fakeCount answers; the first six are of things that exist now, the others of things that happened. */
enum { ALLOCATED, MAPPED, EVENTS, OPEN_EVENTS, QUEUED, LAST_ERROR, MEMORY_OPENS, EVENT_OPENS, VIOLATIONS, NUM_COUNTS };

struct handle {
    int pid, fd, device, flags;
    uint64_t bytes, inode;
    char unused[32];
};

struct record {
    uint64_t recorded, completed;
};

struct event {
    struct record *record;
    int fd, device, flags, imported;
};

struct block {
    char *address;
    size_t bytes;
    int fd, device, imported;
};

struct work {
    enum { COPY, RECORD, WAIT } kind;
    struct event *event;
    uint64_t ticket;
    char *target;
    const char *source;
    char *captured;
    size_t bytes;
    struct work *next;
};

struct stream {
    struct work *first, *last;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block blocks[NUM_BLOCKS];
static struct stream streams[NUM_STREAMS];
static long counts[NUM_COUNTS];
static int deferred;
static _Thread_local int current_device, last_error;

static int fail(int code) {
    if (code) last_error = code;
    return code;
}

static int injected(const char *name) {
    const char *wanted = getenv("FAKE_CUDART_FAIL");
    size_t length = strlen(name);
    if (!wanted || strncmp(wanted, name, length) || wanted[length] != ':') return SUCCESS;
    return atoi(wanted + length + 1);
}

/* Every function runs alone, so that counts and queues need no care. */
#define BEGIN(name)                              \
    int code_ = injected(#name);                 \
    if (code_) return fail(code_);               \
    pthread_mutex_lock(&lock)
#define END(code)                                \
    do {                                         \
        int result_ = (code);                    \
        pthread_mutex_unlock(&lock);             \
        return fail(result_);                    \
    } while (0)

static int first_visible(void) {
    const char *mask = getenv("FAKE_CUDART_VISIBLE");
    return mask ? atoi(mask) : 0;
}

static int num_visible(void) { return getenv("FAKE_CUDART_VISIBLE") ? 1 : NUM_DEVICES; }

static int physical(int index) { return index + first_visible(); }

static struct block *block_at(const void *address) {
    for (int i = 0; i < NUM_BLOCKS; i++) {
        const char *start = blocks[i].address, *at = address;
        if (start && at >= start && at < start + blocks[i].bytes) return &blocks[i];
    }
    return NULL;
}

static struct block *free_block(void) {
    for (int i = 0; i < NUM_BLOCKS; i++)
        if (!blocks[i].address) return &blocks[i];
    abort();
}

static void *map(int fd, size_t bytes) {
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) abort();
    return address;
}

static void *create(const char *name, size_t bytes, int *fd) {
    *fd = memfd_create(name, MFD_CLOEXEC);
    if (*fd < 0 || ftruncate(*fd, (off_t)bytes)) abort();
    return map(*fd, bytes);
}

static void export(struct handle *handle, int fd, int device, int flags, size_t bytes) {
    struct stat status;
    fstat(fd, &status);
    memset(handle, 0, sizeof *handle);
    *handle = (struct handle){getpid(), fd, device, flags, bytes, status.st_ino, {0}};
}

static int import(const struct handle *handle, int *fd) {
    char path[64];
    struct stat status;
    if (handle->pid == getpid()) return INVALID_CONTEXT;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    *fd = open(path, O_RDWR | O_CLOEXEC);
    if (*fd < 0) return INVALID_HANDLE;
    if (fstat(*fd, &status) || status.st_ino != handle->inode) {
        close(*fd);
        return INVALID_HANDLE;
    }
    return SUCCESS;
}

/* Streams */

static int run_one(struct stream *stream) {
    struct work *work = stream->first;
    if (!work) return 0;
    if (work->kind == WAIT) {
        struct record *record = work->event->record;
        uint64_t ticket = LATEST_RECORD ? __atomic_load_n(&record->recorded, __ATOMIC_ACQUIRE) : work->ticket;
        if (__atomic_load_n(&record->completed, __ATOMIC_ACQUIRE) < ticket) return 0;
    } else if (work->kind == COPY) {
        memcpy(work->target, work->captured ? work->captured : work->source, work->bytes);
    } else {
        __atomic_store_n(&work->event->record->completed, work->ticket, __ATOMIC_RELEASE);
    }
    stream->first = work->next;
    if (!stream->first) stream->last = NULL;
    counts[QUEUED]--;
    free(work->captured);
    free(work);
    return 1;
}

static void run_all(void) {
    int moved = !deferred;
    while (moved) {
        moved = 0;
        for (int i = 0; i < NUM_STREAMS; i++) moved += run_one(&streams[i]);
    }
}

static int queue(void *handle, struct work work) {
    size_t index = (size_t)handle;
    if (index >= NUM_STREAMS) return INVALID_HANDLE;
    struct work *copy = malloc(sizeof *copy);
    *copy = work;
    struct stream *stream = &streams[index];
    if (stream->last) stream->last->next = copy;
    else stream->first = copy;
    stream->last = copy;
    counts[QUEUED]++;
    run_all();
    return SUCCESS;
}

static int is_used(const struct event *event, const struct block *block) {
    for (int i = 0; i < NUM_STREAMS; i++)
        for (struct work *work = streams[i].first; work; work = work->next) {
            if (event && work->event == event) return 1;
            if (!block || work->kind != COPY) continue;
            if (block_at(work->target) == block || block_at(work->source) == block) return 1;
        }
    return 0;
}

/* For tests */

void fakeDefer(int on) {
    pthread_mutex_lock(&lock);
    deferred = on;
    run_all();
    pthread_mutex_unlock(&lock);
}

/* Run up to `limit` pieces of work, of the lowest stream that can; return how many ran before a wait or the end. */
int fakeAdvance(int limit) {
    int total = 0, moved = 1;
    pthread_mutex_lock(&lock);
    while (moved && total < limit) {
        moved = 0;
        for (int i = 0; i < NUM_STREAMS; i++)
            while (total + moved < limit && run_one(&streams[i])) moved++;
        total += moved;
    }
    pthread_mutex_unlock(&lock);
    return total;
}

long fakeCount(int which) { return which == LAST_ERROR ? last_error : counts[which]; }

/* Devices */

const char *API(GetErrorString)(int code) {
    if (code == OUT_OF_MEMORY) return "out of memory";
    return code == PEER_UNSUPPORTED ? "peer access is not supported" : "fake error";
}

int API(GetLastError)(void) {
    int code = last_error;
    last_error = SUCCESS;
    return code;
}

int API(GetDevice)(int *index) { *index = current_device; return SUCCESS; }

int API(SetDevice)(int index) {
    if (index < 0 || index >= num_visible()) return fail(INVALID_DEVICE);
    current_device = index;
    return SUCCESS;
}

int API(DeviceGetPCIBusId)(char *text, int length, int index) {
    if (index < 0 || index >= num_visible()) return fail(INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:%02X:00.0", physical(index) + 1);
    return SUCCESS;
}

int API(DeviceGetByPCIBusId)(int *index, const char *text) {
    unsigned bus = 0;
    sscanf(text, "0000:%X:", &bus);
    *index = (int)bus - 1 - first_visible();
    return *index < 0 || *index >= num_visible() ? fail(INVALID_DEVICE) : SUCCESS;
}

int API(DeviceCanAccessPeer)(int *answer, int index, int peer) {
    *answer = index != peer && !getenv("FAKE_CUDART_NO_PEER");
    return SUCCESS;
}

/* Memory */

int API(Malloc)(void **address, size_t bytes) {
    BEGIN(Malloc);
    const char *limit = getenv("FAKE_CUDART_MEMORY_BYTES");
    size_t total = bytes;
    for (int i = 0; i < NUM_BLOCKS; i++) total += blocks[i].address && !blocks[i].imported ? blocks[i].bytes : 0;
    if (limit && total > strtoull(limit, NULL, 10)) END(OUT_OF_MEMORY);
    struct block *block = free_block();
    block->address = create("fake-memory", bytes, &block->fd);
    block->bytes = bytes;
    block->device = physical(current_device);
    block->imported = 0;
    counts[ALLOCATED]++;
    *address = block->address;
    END(SUCCESS);
}

static int drop(void *address, int imported, int count) {
    struct block *block = block_at(address);
    if (!block || block->address != address || block->imported != imported) return INVALID_VALUE;
    if (is_used(NULL, block)) counts[VIOLATIONS]++;
    munmap(block->address, block->bytes);
    close(block->fd);
    block->address = NULL;
    counts[count]--;
    return SUCCESS;
}

int API(Free)(void *address) {
    BEGIN(Free);
    END(drop(address, 0, ALLOCATED));
}

int API(IpcGetMemHandle)(struct handle *handle, void *address) {
    BEGIN(IpcGetMemHandle);
    struct block *block = block_at(address);
    if (!block || block->imported) END(INVALID_VALUE);
    export(handle, block->fd, block->device, 0, block->bytes);
    END(SUCCESS);
}

int API(IpcOpenMemHandle)(void **address, struct handle handle, unsigned flags) {
    BEGIN(IpcOpenMemHandle);
    int fd;
    if (flags != 1) END(INVALID_VALUE);
    if (handle.device != physical(current_device) && getenv("FAKE_CUDART_NO_PEER")) END(PEER_UNSUPPORTED);
    int code = import(&handle, &fd);
    if (code) END(code);
    struct block *block = free_block();
    *block = (struct block){map(fd, handle.bytes), handle.bytes, fd, handle.device, 1};
    counts[MAPPED]++;
    counts[MEMORY_OPENS]++;
    *address = block->address;
    END(SUCCESS);
}

int API(IpcCloseMemHandle)(void *address) {
    BEGIN(IpcCloseMemHandle);
    END(drop(address, 1, MAPPED));
}

int API(MemcpyAsync)(void *target, const void *source, size_t bytes, int kind, void *stream) {
    BEGIN(MemcpyAsync);
    struct work work = {COPY, NULL, 0, target, source, NULL, bytes, NULL};
    struct block *from = block_at(source), *to = block_at(target);
    int outside = (from && (const char *)source + bytes > from->address + from->bytes) ||
                  (to && (char *)target + bytes > to->address + to->bytes);
    if (kind != 4 || outside) END(INVALID_VALUE);
    if (!from) {
        work.captured = malloc(bytes);
        memcpy(work.captured, source, bytes);
    }
    END(queue(stream, work));
}

/* Events */

int API(EventCreateWithFlags)(struct event **event, unsigned flags) {
    BEGIN(EventCreateWithFlags);
    int fd;
    struct record *record = create("fake-event", PAGE, &fd);
    *event = malloc(sizeof **event);
    **event = (struct event){record, fd, current_device, (int)flags, 0};
    counts[EVENTS]++;
    END(SUCCESS);
}

int API(EventDestroy)(struct event *event) {
    BEGIN(EventDestroy);
    if (is_used(event, NULL)) {
        /* CUDA would keep it until the work is done; HIP would let the device write where nothing is. */
        counts[VIOLATIONS]++;
        END(SUCCESS);
    }
    munmap(event->record, PAGE);
    close(event->fd);
    counts[event->imported ? OPEN_EVENTS : EVENTS]--;
    free(event);
    END(SUCCESS);
}

int API(EventRecord)(struct event *event, void *stream) {
    BEGIN(EventRecord);
    if ((size_t)event->device != (size_t)stream / STREAMS_PER_DEVICE) END(INVALID_HANDLE);
    uint64_t ticket = __atomic_add_fetch(&event->record->recorded, 1, __ATOMIC_ACQ_REL);
    END(queue(stream, (struct work){RECORD, event, ticket, NULL, NULL, NULL, 0, NULL}));
}

static int is_complete(const struct event *event) {
    run_all();
    uint64_t completed = __atomic_load_n(&event->record->completed, __ATOMIC_ACQUIRE);
    return completed >= __atomic_load_n(&event->record->recorded, __ATOMIC_ACQUIRE);
}

int API(EventQuery)(struct event *event) {
    BEGIN(EventQuery);
    END(is_complete(event) ? SUCCESS : NOT_READY);
}

int API(EventSynchronize)(struct event *event) {
    for (;;) {
        BEGIN(EventSynchronize);
        int complete = is_complete(event);
        pthread_mutex_unlock(&lock);
        if (complete) return SUCCESS;
        sched_yield();
    }
}

int API(StreamWaitEvent)(void *stream, struct event *event, unsigned flags) {
    BEGIN(StreamWaitEvent);
    uint64_t ticket = __atomic_load_n(&event->record->recorded, __ATOMIC_ACQUIRE);
    if (flags || ticket > MAX_RECORDS) END(INVALID_VALUE);
    END(queue(stream, (struct work){WAIT, event, ticket, NULL, NULL, NULL, 0, NULL}));
}

int API(IpcGetEventHandle)(struct handle *handle, struct event *event) {
    BEGIN(IpcGetEventHandle);
    if (event->flags != EVENT_FLAGS) END(INVALID_HANDLE);
    export(handle, event->fd, event->device, event->flags, PAGE);
    END(SUCCESS);
}

int API(IpcOpenEventHandle)(struct event **event, struct handle handle) {
    BEGIN(IpcOpenEventHandle);
    int fd, code = import(&handle, &fd);
    if (code) END(code);
    *event = malloc(sizeof **event);
    **event = (struct event){map(fd, PAGE), fd, current_device, handle.flags, 1};
    counts[OPEN_EVENTS]++;
    counts[EVENT_OPENS]++;
    END(SUCCESS);
}
