// A libcuda as far as KvikIO asks for one. Its device's memory is the host's, where the host cannot touch it: each piece
// is mapped twice, at the address that is given out without any access.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

typedef unsigned long long u64;
typedef void* Handle;
enum { OK = 0, INVALID = 1, BAD_CONTEXT = 201 };
enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, DEVICE_ORDINAL = 9, ON_DEVICE = 2 };

struct Piece { size_t size; char* inside; };
static std::map<u64, Piece> pieces;
static std::mutex lock;
static char context, handle;
static thread_local std::vector<Handle> contexts;

static char* inside(u64 address, size_t size, u64* base = nullptr, size_t* whole = nullptr) {
    std::lock_guard<std::mutex> held(lock);
    auto after = pieces.upper_bound(address);
    if (after == pieces.begin()) return nullptr;
    auto& [start, piece] = *--after;
    if (address + size > start + piece.size) return nullptr;
    if (base) *base = start, *whole = piece.size;
    return piece.inside + (address - start);
}
static int copy(u64 to, u64 from, size_t size) {
    if (contexts.empty()) return BAD_CONTEXT;
    char *into = inside(to, size), *out = inside(from, size);
    if (!into == !out) return INVALID;  // one side is the device's, the other the host's
    memcpy(into ? into : (char*)to, out ? out : (char*)from, size);
    return OK;
}

extern "C" {
int cuInit(unsigned flags) { return flags ? INVALID : OK; }
int cuMemAlloc_v2(u64* address, size_t size) {
    if (contexts.empty()) return BAD_CONTEXT;
    int file = memfd_create("device", 0);
    if (ftruncate(file, size)) abort();
    char* outside = (char*)mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
    char* inside = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    std::lock_guard<std::mutex> held(lock);
    pieces[*address = (u64)outside] = {size, inside};
    return OK;
}
int cuMemcpyHtoD_v2(u64 to, const void* from, size_t size) { return copy(to, (u64)from, size); }
int cuMemcpyDtoH_v2(void* to, u64 from, size_t size) { return copy((u64)to, from, size); }

int cuDriverGetVersion(int* version) { return *version = 12020, OK; }
int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_OF_THE_FAKE", OK; }
int cuGetErrorString(int, const char** words) { return *words = "the fake driver refuses", OK; }
int cuDeviceGet(int* device, int number) { return *device = number, number ? INVALID : OK; }
int cuDeviceGetCount(int* count) { return *count = 1, OK; }
int cuDeviceGetAttribute(int* value, int, int) { return *value = 0, OK; }
int cuDevicePrimaryCtxRetain(Handle* to, int) { return *to = &context, OK; }
int cuDevicePrimaryCtxRelease_v2(int) { return OK; }
int cuCtxCreate_v2(Handle*, unsigned, int) { return INVALID; }
int cuCtxDestroy_v2(Handle) { return INVALID; }
int cuCtxPushCurrent_v2(Handle which) { return contexts.push_back(which), which == &context ? OK : INVALID; }
int cuCtxPopCurrent_v2(Handle* which) {
    if (contexts.empty()) return BAD_CONTEXT;
    return *which = contexts.back(), contexts.pop_back(), OK;
}
int cuCtxGetCurrent(Handle* which) { return *which = contexts.empty() ? nullptr : contexts.back(), OK; }
int cuCtxGetDevice(int* device) { return *device = 0, contexts.empty() ? BAD_CONTEXT : OK; }

int cuPointerGetAttribute(void* to, int which, u64 address) {
    bool ours = inside(address, 1);
    if (which == MEMORY_TYPE) return *(int*)to = ours ? ON_DEVICE : 0, OK;
    if (!ours) return INVALID;
    if (which == CONTEXT) return *(Handle*)to = &context, OK;
    if (which == DEVICE_POINTER) return *(u64*)to = address, OK;
    if (which == DEVICE_ORDINAL) return *(int*)to = 0, OK;
    return INVALID;
}
int cuPointerGetAttributes(unsigned count, const int* which, void** to, u64 address) {
    for (unsigned i = 0; i < count; ++i)
        if (int code = cuPointerGetAttribute(to[i], which[i], address)) return code;
    return OK;
}
int cuMemGetAddressRange_v2(u64* base, size_t* size, u64 address) {
    return inside(address, 1, base, size) ? OK : INVALID;
}
int cuMemHostAlloc(void** to, size_t size, unsigned) { return posix_memalign(to, 4096, size) ? INVALID : OK; }
int cuMemFreeHost(void* memory) { return free(memory), OK; }
int cuMemHostRegister_v2(void*, size_t, unsigned) { return OK; }
int cuMemHostUnregister(void*) { return OK; }
int cuMemcpyAsync(u64 to, u64 from, size_t size, Handle) { return copy(to, from, size); }
int cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t size, Handle) { return copy(to, (u64)from, size); }
int cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t size, Handle) { return copy((u64)to, from, size); }

int cuStreamCreate(Handle* stream, unsigned) { return *stream = &handle, contexts.empty() ? BAD_CONTEXT : OK; }
int cuStreamDestroy_v2(Handle) { return OK; }
int cuStreamSynchronize(Handle) { return contexts.empty() ? BAD_CONTEXT : OK; }
int cuEventCreate(Handle* event, unsigned) { return *event = &handle, OK; }
int cuEventDestroy_v2(Handle) { return OK; }
int cuEventRecord(Handle, Handle) { return OK; }
int cuEventQuery(Handle) { return OK; }
int cuEventSynchronize(Handle) { return OK; }
int cuLaunchHostFunc(Handle, void (*call)(void*), void* data) { return call(data), OK; }
}
